"""Applies a :class:`~lms.swap_plan.SwapPlan` to the TensorFlow graph it was made for.

Requires: the graph was not edited before, and every edge of the plan goes forward in the plan's order.
Ensures: every planned use reads a swap-in, every added op is marked, and the values computed are the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import tensorflow as tf
from tensorflow.core.framework.attr_value_pb2 import AttrValue
from tensorflow.python.client import pywrap_tf_session as c_api

from lms.errors import LMSError
from lms.graph import Graph, Op, Use
from lms.host_reads import HostRead, Relocation
from lms.kernels import Detours, with_their_groups
from lms.liveness import positions
from lms.swap_plan import Swap, SwapIn, SwapPlan
from lms.tf_graph import MARK, GraphView
from lms.transports.base import HOST_DEVICE, Transport
from lms.transports.copy_op import add_copy
from lms.twins import TWIN_SLOTS

MARK_ATTR = "_lms"
"""Attribute of every added op; its value says what the op is for."""

PROTECT_ATTR = "_grappler_do_not_remove"

COLOCATION_ATTR = "_class"
"""Names the ops beside which an op runs."""

NOTHING = {
    "value": AttrValue(tensor=tf.make_tensor_proto([], tf.int32)),
    "dtype": AttrValue(type=tf.int32.as_datatype_enum),
}
"""The attributes of a constant without elements. Making it with them takes a quarter of ``tf.constant``."""

GRADIENT_ATTR = "_gradient_op_type"
"""Under which name TensorFlow looks for the gradient of an op that has this attribute."""

MOVED = "LmsMoved"
"""The name for swaps, whatever ops a transport makes of them: the same values, so the gradient passes."""


class RewriteError(LMSError):
    """A plan and a graph do not belong together. The graph was not touched."""


@dataclass(frozen=True)
class Edits:
    """What was added to a graph."""

    ops: tuple[Any, ...]
    swap_outs: int
    swap_ins: int
    control_edges: int
    bypassed: frozenset[str]
    """Names of the aliases whose readers read a swap-in now: what a session feeds for one would be lost."""


def is_edited(tf_graph: Any) -> bool:
    """Whether a graph holds ops of an earlier edit."""
    return any(MARK in op.name and MARK_ATTR in op.node_def.attr for op in tf_graph.get_operations())


def rewrite(
    tf_graph: Any,
    view: GraphView,
    plan: SwapPlan,
    transport: Transport,
    relocation: Relocation | None = None,
) -> Edits:
    """Edit ``tf_graph`` as ``plan`` says.

    Args:
        tf_graph: The graph that ``view`` was read from.
        view: Its values and objects.
        plan: A plan for ``view.graph``, or for the graph of ``relocation``.
        transport: How tensors leave and come back.
        relocation: Which ops read from the host, where some do.

    Raises:
        RewriteError: If the graph was edited before, or the plan does not fit it. Nothing was changed then.
    """
    if is_edited(tf_graph):
        raise RewriteError(
            f"{getattr(tf_graph, 'name', 'the graph')} was edited already; a graph is edited once"
        )
    if relocation is not None:
        view = relocated(view, relocation)
    require_forward(view.graph, plan)
    editor = _Editor(view, transport, plan)
    with tf_graph.as_default(), tf.control_dependencies(None), tf.device(None), tf_graph.name_scope(None):
        if relocation is not None:
            editor.read_from_host(relocation)
        for swap in sorted(plan.swaps, key=lambda swap: swap.tensor):
            editor.swap(swap)
        for edge in plan.serial_edges:
            for before in editor.both(edge.before):
                editor.order(before, edge.after)
        place = {editor.ops[op]: place for place, op in enumerate(plan.order)}
        detours = Detours(place, with_their_groups(editor.tied, view.groups), editor.mark)
        for group in view.groups:
            detours.round(group)
    return Edits(
        tuple(editor.added),
        editor.swap_outs,
        editor.swap_ins,
        editor.control_edges,
        frozenset(editor.bypassed),
    )


def require_forward(graph: Graph, plan: SwapPlan) -> None:
    """Check that every edge of ``plan`` goes forward in its order, so that it can make no cycle.

    Raises:
        RewriteError: Naming the first op that does not.
    """
    if sorted(plan.order) != list(range(len(graph.ops))):
        raise RewriteError(f"the plan orders {len(plan.order)} ops; the graph has {len(graph.ops)}")
    place = positions(plan.order)

    def forward(before: int, after: int, what: str) -> None:
        if place[before] >= place[after]:
            raise RewriteError(
                f"{what}: {graph.ops[before].name} does not run before {graph.ops[after].name}"
            )

    for op, earlier in enumerate(graph.predecessors):
        for other in earlier:
            forward(other, op, "plan order")
    for edge in plan.serial_edges:
        forward(edge.before, edge.after, "serial edge")
    for swap in plan.swaps:
        producer = graph.tensors[swap.tensor].op
        if swap.after != producer:
            forward(producer, swap.after, "swap-out")
        for op in swap.blocks:
            forward(swap.after, op, "swap-out blocks")
        for swap_in in swap.swap_ins:
            if place[swap_in.trigger] < place[swap.after]:
                raise RewriteError(
                    f"swap-in of {graph.tensor_name(swap.tensor)} may start before it was swapped out"
                )
            for op in [*(use.op for use in swap_in.uses), *swap_in.blocks]:
                forward(swap_in.trigger, op, "swap-in")


def relocated(view: GraphView, relocation: Relocation) -> GraphView:
    """The view of the relocated graph; the ops and tensors that it adds are ``None`` until they are made."""
    numbers = {old: new for new, old in enumerate(relocation.ops) if old is not None}
    return replace(
        view,
        graph=relocation.graph,
        ops=tuple(None if old is None else view.ops[old] for old in relocation.ops),
        tensors=tuple(None if old is None else view.tensors[old] for old in relocation.tensors),
        twins={numbers[op]: twin for op, twin in view.twins.items()},
    )


class _Editor:
    def __init__(self, view: GraphView, transport: Transport, plan: SwapPlan) -> None:
        self.view, self.transport, self._copied = view, transport, plan.copied
        self.ops, self.tensors = list(view.ops), list(view.tensors)
        self.added: list[Any] = []
        self.swap_outs = self.swap_ins = self.control_edges = 0
        self.bypassed: set[str] = set()
        self.tied: set[Any] = set()
        """The ops of the graph before that wait for another one now, or are waited for."""
        self._ordered: set[tuple[str, str]] = set()
        self._gates: dict[str, Any] = {}

    def read_from_host(self, relocation: Relocation) -> None:
        """Make the copies of a relocated graph, and let its ops read them."""
        reads = {read.op: read for read in relocation.reads}
        _send_to_host([self.ops[read.op] for read in relocation.reads if read.fetches])
        fetched = {op for read in relocation.reads for op in read.fetches}
        for op in relocation.graph.ops:
            if op.id in reads:
                self._read_there(reads[op.id])
            elif op.id in fetched:
                self._fetch(op)
            elif self.ops[op.id] is None:
                self._add(op, self._out(self.tensors[op.inputs[0]], 1))

    def _read_there(self, read: HostRead) -> None:
        for slot, held in read.slots.items():
            self.ops[read.op]._update_input(slot, self.tensors[held])

    def _fetch(self, op: Op) -> None:
        """Copy what an op has made on the host to the device, for all that read it."""
        made = self.tensors[op.inputs[0]]
        uses = [use for use in self.view.graph.uses[op.outputs[0]] if self.ops[use.op] is not None]
        device = next((self.ops[use.op].device for use in uses), "")
        back = self.transport.swap_in(made, made, device, f"{_base(made)}/fetch")
        self.mark(back.op, "swap_in")
        self.swap_ins += 1
        self._add(op, back)
        for use in uses:
            self._redirect(use, back)

    def _add(self, op: Op, made: Any) -> None:
        self.ops[op.id], self.tensors[op.outputs[0]] = made.op, made

    def _out(self, tensor: Any, readers: int) -> Any:
        held = self.transport.swap_out(tensor, readers, f"{_base(tensor)}/swap_out")
        self.mark(held.op, "swap_out")
        self.swap_outs += 1
        return held

    def swap(self, swap: Swap) -> None:
        tensor = self.tensors[swap.tensor]
        base = _base(tensor)
        if swap.tensor in self._copied:
            held = self.ops[self._copied[swap.tensor]].outputs[0]
        else:
            after = self.ops[swap.after]
            with tf.control_dependencies([] if after is tensor.op else self.both(swap.after)):
                held = self._out(tensor, len(swap.swap_ins))
        for op in swap.blocks:
            self.order(held.op, op)
        for number, swap_in in enumerate(swap.swap_ins):
            self._swap_in(swap, swap_in, held, f"{base}/swap_in_{number}")

    def _swap_in(self, swap: Swap, swap_in: SwapIn, held: Any, name: str) -> None:
        tensor, ops = self.tensors[swap.tensor], self.ops
        device = tensor.op.device or ops[swap_in.uses[0].op].device
        with tf.control_dependencies(self.both(swap_in.trigger)):
            back = self.transport.swap_in(held, tensor, device, name)
        self.mark(back.op, "swap_in")
        self.swap_ins += 1
        versions = {swap.tensor: back}
        for use in swap_in.uses:
            read = self.view.graph.ops[use.op].inputs[use.slot]
            self._redirect(use, self._version(read, versions, name))
        for op in swap_in.blocks:
            self.order(back.op, op)

    def _redirect(self, use: Use, version: Any) -> None:
        op = self.ops[use.op]
        op._update_input(use.slot, version)
        if use.op in self.view.twins and use.slot == TWIN_SLOTS[op.type]:
            self.view.twins[use.op]._update_input(0, version)

    def _version(self, tensor: int, versions: dict[int, Any], name: str) -> Any:
        """What stands for ``tensor``, an alias of a swapped tensor, on top of the copy that came back."""
        if tensor not in versions:
            original = self.view.graph.tensors[tensor].alias_of
            if original is None:
                raise RewriteError(
                    f"{self.view.graph.tensor_name(tensor)} is not an alias of what was swapped"
                )
            self.bypassed.add(self.tensors[tensor].name)
            source = self._version(original, versions, name)
            versions[tensor] = self._alias_again(self.tensors[tensor], original, source, name)
        return versions[tensor]

    def _alias_again(self, tensor: Any, original: int, source: Any, name: str) -> Any:
        op = tensor.op
        if op.type in ("Identity", "IdentityN") and not op.control_inputs:
            return source
        if op.type == "IdentityN":
            with tf.control_dependencies([op]), tf.device(op.device or None):
                copy = add_copy("Identity", source, "", f"{name}/identity")
            self.mark(copy.op, "alias")
            return copy
        replaced = self.tensors[original]
        inputs = [source if item is replaced else item for item in op.inputs]
        attrs = {key: value for key, value in op.node_def.attr.items() if not key.startswith("_")}
        with tf.control_dependencies([op] if op.control_inputs else []), tf.device(op.device or None):
            copy = op.graph._create_op_internal(
                op.type, inputs, [tensor.dtype], name=f"{name}/{op.type.lower()}", attrs=attrs
            )
        copy.outputs[0].set_shape(tensor.shape)
        self.mark(copy, "alias")
        return copy.outputs[0]

    def mark(self, op: Any, purpose: str) -> None:
        if purpose.startswith("swap"):  # an alias is an op of the user's kind, with its own gradient
            op._set_attr_with_buf(GRADIENT_ATTR, _packed(MOVED))
        op._set_attr_with_buf(MARK_ATTR, _packed(purpose))
        op._set_attr_with_buf(PROTECT_ATTR, _packed(True))
        self.added.append(op)

    def both(self, op: int) -> list[Any]:
        """The op, and the second one that it stands for: who waits for the step waits for both.

        oneDNN need not merge them, and a second one for which nobody waits keeps what it reads until the
        executor comes to it.
        """
        twin = self.view.twins.get(op)
        found = [self.ops[op]] if twin is None else [self.ops[op], twin]
        self.tied.update(found)
        return found

    def order(self, before: Any, after: int) -> None:
        """A control edge to an op, or to the gate of the two that it stands for; each once."""
        first, *twin = self.both(after)
        waiting = self._gate(first, *twin) if twin else first
        if (before.name, waiting.name) not in self._ordered:
            self._ordered.add((before.name, waiting.name))
            self._wait(waiting, before)

    def _gate(self, op: Any, twin: Any) -> Any:
        """The one op that two wait for, so that oneDNN finds both waiting for the same.

        With an edge to each, Grappler's dependency optimizer drops those that the inputs of one of them imply
        and the inputs of the other do not. It bypasses a ``NoOp`` as well, and leaves a protected constant.
        """
        gate = self._gates.get(op.name)
        if gate is None:
            with op.graph.as_default(), tf.control_dependencies(None), tf.device(op.device or None):
                name = f"{MARK}{op.name.replace('/', '_')}/gate"
                gate = op.graph._create_op_internal("Const", [], [tf.int32], name=name, attrs=NOTHING)
            self._gates[op.name] = gate
            self.mark(gate, "gate")
            self._wait(op, gate)
            self._wait(twin, gate)
        return gate

    def _wait(self, op: Any, before: Any) -> None:
        op._add_control_input(before)
        self.control_edges += 1


def _send_to_host(ops: Sequence[Any]) -> None:
    """Have ``ops`` run on the host, and none where another one runs: that would contradict one of the two."""
    if not ops:
        return
    for op in ops:
        op._set_device(HOST_DEVICE)
        op._clear_attr(COLOCATION_ATTR)
    names = {f"loc:@{op.name}".encode() for op in ops}
    for op in ops[0].graph.get_operations():
        beside = _attr_or_empty(op, COLOCATION_ATTR)
        if not names.isdisjoint(beside):
            kept = AttrValue.ListValue(s=[name for name in beside if name not in names])
            op._set_attr(COLOCATION_ATTR, AttrValue(list=kept))


@cache
def _packed(value: str | bool) -> Any:
    """An attribute's value as TensorFlow's C library takes it; the few that there are get packed once."""
    packed = AttrValue(b=value) if isinstance(value, bool) else AttrValue(s=value.encode())
    return c_api.TF_NewBufferFromString(packed.SerializeToString())


def _attr_or_empty(op: Any, name: str) -> Any:
    try:
        return op.get_attr(name)
    except ValueError:
        return ()


def _base(tensor: Any) -> str:
    """How the names of the ops begin that move ``tensor``."""
    return f"{tensor.op.name}/{MARK}{tensor.value_index}"


@tf.RegisterGradient(MOVED)  # type: ignore[untyped-decorator]
def _moved_gradient(op: Any, gradient: Any) -> Any:
    """Who differentiates an edited function, later on, gets the gradient of the unedited one."""
    return gradient
