"""Reads a TensorFlow graph into the engine's values (:mod:`lms.graph`) and keeps the way back to its ops."""

import heapq
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import tensorflow as tf
from tensorflow.python.framework.func_graph import FuncGraph
from tensorflow.python.ops.control_flow_v2_func_graphs import ControlFlowFuncGraph
from tensorflow.python.util import _pywrap_util_port

from lms.compiled import is_compiled, scratch_bytes
from lms.errors import UnreadableError
from lms.graph import Graph, GraphBuilder
from lms.kernels import BETWEEN, Group, find_groups, reserved_bytes
from lms.liveness import Buffers, timeline
from lms.op_types import OUTSIDE_TYPES, SHAPE_READERS, UNSWAPPABLE_TYPES, is_backward, is_collective
from lms.step import is_update, running_ops, step_ops
from lms.twins import BEHIND_BARRIER, Barriers, find_twins

MARK = "lms/"
"""Names of added ops start with it."""

BODY_ATTRS = {
    "PartitionedCall": ("f",),
    "StatefulPartitionedCall": ("f",),
    "If": ("then_branch", "else_branch"),
    "StatelessIf": ("then_branch", "else_branch"),
    "Case": ("branches",),
    "StatelessCase": ("branches",),
    "While": ("body",),
    "StatelessWhile": ("body",),
}
"""Where control flow keeps its bodies; a body's own peak is the op's workspace."""

TINY = frozenset({"BroadcastGradientArgs", "ConcatOffset", "InvertPermutation", "Size", "Shape", "Rank"})
"""Ops whose outputs are a few numbers, however open their shapes are."""

SWITCHES, MERGES = frozenset({"Switch", "RefSwitch"}), frozenset({"Merge", "RefMerge"})
"""Where the branches of a condition of compat.v1 begin and meet."""

LOOPS = frozenset({"NextIteration", "RefNextIteration"})
"""What closes a loop of compat.v1."""

RESERVING, RESERVE = "FusedBatchNormV3", 5
"""Batch normalisation and its last output: cuDNN's own note, always of open shape. On a CPU it is empty, but
where oneDNN merges the activation (:func:`lms.kernels.reserved_bytes`)."""

POOLS = {"MaxPoolGrad": "MaxPool", "MaxPool3DGrad": "MaxPool3D"}
"""On a CPU with oneDNN, its graph pass takes the gradient of pooling where it reads the result from the
pooling itself, which then keeps a byte an element for it: the place of each maximum. Otherwise another kernel
runs, which shares the gradient out in another way. So the result of a pooling stays where one of these reads
it."""

PLACES = "oneDNN's gradient of the pooling reads it"
"""Why the result of a pooling stays on a CPU device."""

POOLING, POOLED, PLACE_BYTES = ("MaxPoolGrad", "MaxPoolGradV2"), 1, 8
"""Where oneDNN does not take it, the gradient of pooling pools again, for the places of the maxima: that
takes a copy of the result (this slot) and an ``int64`` for each element of it (``MaxPoolingGradOp`` in
maxpooling_op.cc)."""

NOT_PLAIN = frozenset({tf.resource, tf.variant, tf.string})

Shapes = Mapping[str, Sequence[int | None] | None]
"""Shapes by tensor name that are better known than the graph itself knows them."""


@dataclass(frozen=True)
class GraphView:
    """A graph as values, with the TensorFlow object of each op id and tensor id."""

    graph: Graph
    ops: tuple[Any, ...]
    tensors: tuple[Any, ...]
    unknown: tuple[str, ...]
    """Names of the tensors whose size is not known."""
    twins: Mapping[int, Any]
    """By op id the second TensorFlow op of an op that stands for two (see :data:`lms.twins.TWIN_SLOTS`)."""
    groups: tuple[Group, ...] = ()
    """Ops that TensorFlow may merge."""
    is_body: bool = False
    """Whether the graph is the body of a condition or loop: a part of a step, of which no user has heard."""


def read_graph(
    tf_graph: Any, device_type: str, shapes: Shapes | None = None, outputs: Iterable[Any] | None = None
) -> GraphView:
    """Read ``tf_graph``.

    Args:
        tf_graph: A ``FuncGraph``, or a ``tf.Graph`` of compat.v1.
        device_type: ``GPU`` or ``CPU``: whose memory is looked at.
        shapes: Completed shapes (:func:`lms.shapes.complete_shapes`).
        outputs: Tensors that outlive the step; ``None``: the function's own outputs.

    Raises:
        UnreadableError: If the graph is none that runs from inputs to outputs.
    """
    in_session = not isinstance(tf_graph, FuncGraph)
    ops = tf_graph.get_operations()
    if in_session:
        ops = step_ops(ops, lambda op: is_backward(op.name, op.type))
    types = {op: op.type for op in ops}
    if not in_session:
        ends = [*(tensor.op for tensor in tf_graph.outputs), *tf_graph.control_outputs]
        running = running_ops(types, ends)
        types = {op: op_type for op, op_type in types.items() if op in running}
    twins = find_twins(types) if device_type == "CPU" else {}
    barriers = Barriers.between(twins)
    has_conditions = not SWITCHES.isdisjoint(types.values())
    ordered = schedule(list(types), twins, barriers)
    groups = find_groups(ordered)
    between = frozenset(op for group in groups for op in group.members[:-1])
    reserves = find_reserves(ordered, between) if device_type == "CPU" and has_onednn() else {}
    reader = _Reader(
        tf_graph, device_type, shapes or {}, in_session, has_conditions, barriers, between, reserves
    )
    second = {first: twin for twin, first in twins.items()}
    for op in ordered:
        reader.add(op, types[op], second.get(op))
    kept = getattr(tf_graph, "outputs", ()) if outputs is None else outputs
    graph = reader.build.build(reader.ids[id(tensor)] for tensor in kept if id(tensor) in reader.ids)
    is_body = isinstance(tf_graph, ControlFlowFuncGraph)
    ops, tensors, unknown = map(tuple, (reader.ops, reader.tensors, reader.unknown))
    return GraphView(graph, ops, tensors, unknown, reader.twins, tuple(groups), is_body)


def has_onednn() -> bool:
    """Whether oneDNN's kernels run on the CPU: ``TF_ENABLE_ONEDNN_OPTS`` says so, else the build."""
    return bool(_pywrap_util_port.IsMklEnabled())


def find_reserves(ordered: Sequence[Any], between: Collection[Any]) -> dict[Any, Any]:
    """For each activation that oneDNN merges with a normalisation what that reserves for its gradient.

    Both run where the activation stands, so there it is made; ``between`` are the ops merged into others.
    """
    place = {op: index for index, op in enumerate(ordered)}
    reserves = {}
    for op in between:
        if op.type == RESERVING:
            readers = [one for one in op.outputs[0].consumers() if one in place]
            (activation,) = (one for one in readers if one.type not in SHAPE_READERS)
            reserve = op.outputs[RESERVE]
            if all(place[reader] > place[activation] for reader in reserve.consumers() if reader in place):
                reserves[activation] = reserve
    return reserves


def schedule(
    ops: Sequence[Any], twins: Mapping[Any, Any] | None = None, barriers: Barriers | None = None
) -> Sequence[Any]:
    """``ops`` in an order in which every input comes first; the order of creation, wherever that is one.

    Keys of ``twins`` are left out: they run with the op they map to.
    """
    twins, barriers = twins or {}, barriers or Barriers()
    ops = [op for op in ops if op not in twins]
    place = {op: index for index, op in enumerate(ops)}
    place.update((twin, place[op]) for twin, op in twins.items())
    before = [[place[t.op] for t in op.inputs] + [place[c] for c in barriers.controls(op)] for op in ops]
    for twin, op in twins.items():
        before[place[op]] += [place[c] for c in twin.control_inputs]
    if all(not earlier or max(earlier) < index for index, earlier in enumerate(before)):
        return ops
    waiting = [len(earlier) for earlier in before]
    after: list[list[int]] = [[] for _ in ops]
    for index, earlier in enumerate(before):
        for other in earlier:
            after[other].append(index)
    ready = [index for index, count in enumerate(waiting) if not count]
    order: list[Any] = []
    while ready:
        index = heapq.heappop(ready)
        order.append(ops[index])
        for later in after[index]:
            waiting[later] -= 1
            if not waiting[later]:
                heapq.heappush(ready, later)
    if len(order) < len(ops):
        if any(op.type in LOOPS for op in ops):
            raise UnreadableError(
                "the graph holds a while loop of compat.v1; call tf.compat.v1.enable_control_flow_v2()"
            )
        raise UnreadableError(
            "of two gradients that oneDNN may merge one leads to the other; one update a step would help"
        )
    return order


def _in_frame(op: Any) -> bool:
    """Whether an op is part of a condition or loop of compat.v1; what XLA compiles into one op is in none."""
    frame = op._get_control_flow_context()
    while frame is not None and frame.IsXLAContext():
        frame = frame.outer_context
    return frame is not None


class _Reader:
    def __init__(
        self,
        tf_graph: Any,
        device_type: str,
        shapes: Shapes,
        in_session: bool,
        has_conditions: bool,
        barriers: Barriers,
        between: Collection[Any],
        reserves: Mapping[Any, Any],
    ) -> None:
        self.build = GraphBuilder()
        self.ops: list[Any] = []
        self.tensors: list[Any] = []
        self.ids: dict[int, int] = {}
        self.unknown: list[str] = []
        self.twins: dict[int, Any] = {}
        self._op_ids: dict[Any, int] = {}
        self._places: dict[Any, int] = {}
        """By pooling the tensor of places that oneDNN keeps for its gradient."""
        self._depths: list[int] = []
        self._tf_graph, self._device_type, self._shapes = tf_graph, device_type, shapes
        self._in_session, self._has_conditions, self._barriers = in_session, has_conditions, barriers
        self._between, self._reserves = between, reserves
        self._reserving = {reserve.op for reserve in reserves.values()}

    def add(self, op: Any, op_type: str, twin: Any = None) -> None:
        outputs = list(op.outputs)
        inputs = [self.ids[id(tensor)] for tensor in op.inputs]
        controls = [self._op_ids[control] for control in self._barriers.controls(op)]
        if twin is not None:
            outputs += twin.outputs
            controls += [self._op_ids[control] for control in twin.control_inputs]
            self._op_ids[twin] = len(self.ops)
            self.twins[len(self.ops)] = twin
        if op_type in SHAPE_READERS:
            controls += [self._op_ids[tensor.op] for tensor in op.inputs]
            inputs = []
        in_frame = _in_frame(op)
        elsewhere = op_type in OUTSIDE_TYPES or (self._device_type == "GPU" and "CPU" in op.device)
        depth = self._depth(op, op_type, controls) if self._has_conditions else 0
        items = [_item_bytes(tensor.dtype.as_datatype_enum) for tensor in outputs]
        sizes = [
            self._nbytes(op_type, tensor, item, elsewhere)
            for tensor, item in zip(outputs, items, strict=True)
        ]
        if pools := self._keeps_places(op, op_type):
            sizes.append((sizes[0] or 0) // items[0])
            outputs.append(None)
        elif op in self._reserves:
            reserve = self._reserves[op]
            sizes.append(self._reserved(reserve.op))
            outputs.append(reserve)
            items.append(_item_bytes(reserve.dtype.as_datatype_enum))
        elif self._reads_places(op, op_type):
            inputs.append(self._places[op.inputs[POOLED].op])
        made = self.build.add(
            op.name,
            op_type,
            inputs=inputs,
            outputs=sizes,
            controls=controls,
            aliases=[0, 0] if op_type in SWITCHES else None,
            outside=elsewhere,
            forbidden="control flow"
            if in_frame
            else PLACES
            if pools
            else self._forbidden(op, op_type, items),
            workspace_bytes=self._workspace(op, op_type),
            chainable=False if self._in_session and is_update(op_type) else None,
            conditional=in_frame or depth > 0 or op_type in MERGES,
        )
        self._op_ids[op] = len(self.ops)
        self._depths.append(depth)
        self.ops.append(op)
        for number, tensor in zip(made, outputs, strict=True):
            self.ids[id(tensor)] = number
            self.tensors.append(tensor)
        if pools:
            self._places[op] = made[-1]

    def _keeps_places(self, op: Any, op_type: str) -> bool:
        """Whether a pooling keeps the places of its maxima for its gradient."""
        if self._device_type != "CPU" or op_type not in POOLS.values() or not has_onednn():
            return False
        return any(
            POOLS.get(reader.type) == op_type and reader.inputs[POOLED].op is op
            for reader in op.outputs[0].consumers()
        )

    def _reads_places(self, op: Any, op_type: str) -> bool:
        return op_type in POOLS and op.inputs[POOLED].op in self._places

    def _depth(self, op: Any, op_type: str, controls: Sequence[int]) -> int:
        """In how many conditions of compat.v1 an op stands; TensorFlow does not say it of gradients."""
        before = [*(self._op_ids[tensor.op] for tensor in op.inputs), *controls]
        depth = max((self._depths[earlier] for earlier in before), default=0)
        return max(0, depth + (op_type in SWITCHES) - (op_type in MERGES))

    def _nbytes(self, op_type: str, tensor: Any, item_bytes: int, elsewhere: bool) -> int | None:
        if not item_bytes or op_type in TINY:
            return 0
        if op_type == RESERVING and tensor.value_index == RESERVE:
            return 0
        size: int | None = tensor.shape.num_elements()
        if size is None and (better := self._shapes.get(tensor.name)) is not None:
            size = _product(better)
        if size is None:
            if not elsewhere:
                self.unknown.append(tensor.name)
            return None
        return size * item_bytes

    def _reserved(self, normalisation: Any) -> int | None:
        read = normalisation.inputs[0]
        nbytes = self._nbytes(read.op.type, read, read.dtype.size, elsewhere=True)
        return None if nbytes is None else reserved_bytes(normalisation, nbytes // read.dtype.size)

    def _forbidden(self, op: Any, op_type: str, items: Sequence[int]) -> str | Sequence[str | None] | None:
        if op_type.startswith("Lms"):
            return "swapped already"
        behind = op in self._barriers.identities
        reason = BEHIND_BARRIER if behind else UNSWAPPABLE_TYPES.get(op_type)
        between = op in self._between
        if all(items) and not between:
            return reason
        reasons = [reason if item else "not plain memory" for item in items]
        return [BETWEEN, *reasons[1:]] if between else reasons

    def _workspace(self, op: Any, op_type: str) -> int:
        if op in self._reserving:  # what it reads is still there then
            return self._reserved(op) or 0
        if op_type in POOLING and self._device_type == "CPU" and not self._reads_places(op, op_type):
            pooled = op.inputs[POOLED]
            nbytes = self._nbytes(op_type, pooled, pooled.dtype.size, elsewhere=True) or 0
            return int(nbytes + nbytes // pooled.dtype.size * PLACE_BYTES)
        if op_type not in BODY_ATTRS:
            return 0
        names = [name for attr in BODY_ATTRS[op_type] for name in _body_names(op, attr)]
        if self._device_type == "CPU" and is_compiled(op):
            bodies = (_function_graph(self._tf_graph, name) for name in names)
            return max(
                (scratch_bytes(body.get_operations()) for body in bodies if body is not None), default=0
            )
        return max((peak_of_body(self._tf_graph, name, self._device_type) for name in names), default=0)


def peak_of_body(tf_graph: Any, name: str, device_type: str) -> int:
    """The memory that the function ``name`` of ``tf_graph`` needs while it runs; 0 when its graph is gone."""
    body = _function_graph(tf_graph, name)
    if body is None:
        return 0
    view = read_graph(body, device_type)
    buffers = Buffers.of(view.graph)
    return timeline(buffers, range(len(view.graph.ops))).peak_bytes


def _function_graph(tf_graph: Any, name: str) -> Any:
    functions: Mapping[Any, Any] = getattr(tf_graph, "_functions", {})
    found = functions.get(name, functions.get(name.encode()))
    return getattr(found, "graph", None)


def _body_names(op: Any, attr: str) -> list[str]:
    value = op.get_attr(attr)
    return [item.name for item in (value if isinstance(value, list) else [value])]


@cache
def _item_bytes(data_type: int) -> int:
    """Bytes of an element of a type, which TensorFlow numbers; 0 where its memory is not plain."""
    dtype = tf.as_dtype(data_type)
    return 0 if dtype in NOT_PLAIN else int(dtype.size)


def _product(dims: Sequence[int | None]) -> int | None:
    total = 1
    for dim in dims:
        if dim is None:
            return None
        total *= dim
    return total


def has_backward_pass(ops: Sequence[Any]) -> bool:
    """Whether a graph trains: it holds a gradient kernel, or an op that a gradient tape made.

    The last ops are looked at first, for that is where they are.
    """
    return any(is_backward(op.name, op.type) for op in reversed(ops))


def has_collectives(tf_graph: Any) -> bool:
    """Whether a graph, or a function that it calls, talks to other ranks."""
    return any(True for _ in collectives(tf_graph))


def collectives(tf_graph: Any) -> Iterator[Any]:
    """The ops that talk to other ranks, in a graph and in the functions that it calls."""
    return (op for op in all_ops(tf_graph) if is_collective(op.type))


def all_ops(tf_graph: Any) -> Iterator[Any]:
    """The ops of a graph and of the functions that it calls."""
    return (op for graph in all_graphs(tf_graph) for op in graph.get_operations())


def all_graphs(tf_graph: Any) -> Iterator[Any]:
    """A graph, and those of the functions that it calls."""
    yield tf_graph
    ops = tf_graph.get_operations()
    names = {name for op in ops for attr in BODY_ATTRS.get(op.type, ()) for name in _body_names(op, attr)}
    for name in sorted(names):
        body = _function_graph(tf_graph, name)
        if body is not None:
            yield from all_graphs(body)
