"""The passes from a graph that TensorFlow is about to run to the edited one, in their order.

Each takes a :class:`~lms.engine.work.Work` and returns what it has come to. None of them changes the graph
but ``Holding`` and ``Streaming``, which come before the plan, and ``Writing``.
"""

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from tensorflow.core.framework import graph_pb2

from lms.device.horovod_fusion_buffer import FusionBuffer
from lms.device.memory_pool import PoolClaim, Rooms
from lms.engine.planning import Planning
from lms.engine.work import Residents, Specialised, Task, Work
from lms.ir.name_filters import select
from lms.ir.op_traits import MERGES
from lms.optimizer.grappler_item import Output
from lms.planner.fragmentation import rooms_of
from lms.planner.planner import LEAVES_WHAT_FITS, usable_bytes
from lms.profiling.store import Profiles
from lms.reader.node_table import ENTERS, MARK_ATTR, ROOT, SWITCHES, NodeTable
from lms.reader.shapes import complete_shapes
from lms.reader.step_reader import read_step
from lms.reader.survey import Place, constant_bytes, most_bytes
from lms.rewriter.branches import NUMBER, hold_back
from lms.rewriter.decision import write_decision
from lms.rewriter.late_updates import delay_updates
from lms.rewriter.repeats import repeated_node
from lms.rewriter.shape_readers import late_shapes, tell_at_once, told_before
from lms.rewriter.streamable import IN_LOOP
from lms.rewriter.streaming import Streamed, stream_variables
from lms.rewriter.sum_order import has_long_sums, named_beginnings
from lms.rewriter.validation import require_same_pairs, validate
from lms.transports.base import Transport
from lms.variables.handles import static_bytes, value_shape, value_type, variable_handles
from lms.variables.memory import give_own_memory
from lms.variables.on_host import HostVariables


class Pass(Protocol):
    """One pass over a graph."""

    @property
    def name(self) -> str:
        """The pass's name in the report of times."""

    def requires(self, work: Work) -> bool:
        """Tell whether the pass has anything to do."""

    def apply(self, work: Work) -> Work:
        """Return the work with what this pass adds to it."""


def run_passes(passes: Iterable[Pass], work: Work) -> Work:
    """Run and time those passes that find something to do."""
    for one in passes:
        if one.requires(work):
            began = time.perf_counter()
            work = one.apply(work)
            spent = work.seconds.get(one.name, 0.0) + time.perf_counter() - began
            work = replace(work, seconds={**work.seconds, one.name: spent})
    return work


class Parsing:
    """Reads the bytes that TensorFlow has handed over into a node table."""

    name = "parse"

    def requires(self, work: Work) -> bool:
        """Tell whether the bytes have not been read yet."""
        return work.table is None

    def apply(self, work: Work) -> Work:
        """Add the GraphDef and its node table."""
        graph_def = work.graph_def
        if graph_def is None:
            graph_def = graph_pb2.GraphDef.FromString(work.task.request.graph)
        item = work.task.request.item
        table = NodeTable.of(graph_def, fed_nodes(work.task, graph_def))
        return replace(work, graph_def=graph_def, table=table, fetches=tuple(item.fetches()))


class Shaping:
    """Has TensorFlow infer shapes, and completes them with what the call knows."""

    name = "shapes"

    def requires(self, work: Work) -> bool:
        """Tell whether shapes are not known yet."""
        return work.table is not None and len(work.outputs) < len(work.table.nodes)

    def apply(self, work: Work) -> Work:
        """Add the type and shape of each node's outputs."""
        assert work.table is not None  # noqa: S101 - Parsing went before
        if work.outputs:
            return replace(work, outputs=with_added(work.table, work.outputs))
        inferred = work.task.request.item.output_properties(work.table.names)
        outputs = with_specialised(work.table, inferred, work.task.specialised)
        completed = complete_shapes(work.graph_def, work.table, outputs, work.task.hints)
        return replace(work, outputs=completed)


def with_specialised(
    table: NodeTable, outputs: Sequence[list[Output]], made: Specialised
) -> Sequence[list[Output]]:
    """Extend the outputs that TensorFlow infers for a graph to what it has become."""
    if not made.outputs and not made.like:
        return outputs
    known = [made.outputs.get(name, told) for name, told in zip(table.names, outputs, strict=True)]
    for name, text in made.like.items():
        if name in table.number:
            source, _, index = text.partition(":")
            known[table.number[name]] = [known[table.number[source]][int(index or 0)]]
    return known


def with_added(table: NodeTable, outputs: Sequence[Sequence[Output]]) -> Sequence[Sequence[Output]]:
    """Extend a graph's outputs to the nodes that an edit has added.

    These nodes repeat another one, tell the shape of what they read as another one did, or pass it on. A
    constant is what a node reads that runs whether a condition leaves others out or not.
    """
    known = [*outputs, *([()] * (len(table.nodes) - len(outputs)))]
    for node in table.order:
        if node >= len(outputs):
            if (same := repeated_node(table.names[node])) is not None:
                known[node] = known[table.number[same]]
                continue
            if (told := told_before(table.names[node])) is not None:
                known[node] = [known[table.number[told[0]]][told[1]]]
                continue
            read = [known[source.node][source.index] for source in table.inputs[node]]
            if table.types[node] in SWITCHES | MERGES:
                attr = table.nodes[node].attr  # to ask for one that is not there adds it, without a value
                known[node] = read[:1] * (attr["num_outs"].i if "num_outs" in attr else 2)
            elif table.types[node] == "Const":
                known[node] = [NUMBER]
            else:
                known[node] = read if table.types[node] == "IdentityN" else read[:1]
    return known


class Counting:
    """Counts the bytes on the device before the step, and gives each variable memory of its own."""

    name = "residents"

    def __init__(self, fusion: FusionBuffer, host: HostVariables, rooms: Rooms) -> None:
        self._fusion, self._host, self._rooms = fusion, host, rooms

    def requires(self, work: Work) -> bool:
        """Tell whether the shapes are known, and which variables stream; nothing is counted twice."""
        if work.frame is None:
            return bool(work.outputs) and not self._host.is_on
        return bool(work.outputs) and (self._host.is_on or work.residents == Residents())

    def apply(self, work: Work) -> Work:
        """Add the bytes that lie on the device when the step begins."""
        assert work.table is not None  # noqa: S101 - Parsing went before
        inputs = work.task.inputs
        if self._host.is_on:
            streamed = set(arguments_of(work.table, work.streamed.handles))
            self._host.settle(inputs, streamed, work.place.holds)
        pending = give_own_memory(inputs, set(_changed_arguments(work.table)), self._host.has_room)
        if not inputs:
            pending += self._host.bring_back(work.place.holds)
            changed = {work.table.names[node] for node in _changed_handles(work.table, work.place.holds)}
            pending += (nbytes for name, nbytes in work.task.shared.items() if name in changed)
        in_use, _ = work.device.memory() or (0, 0)
        in_use = max(0, in_use - self._rooms.kept_bytes(work.device.name))  # a plan counts its rooms itself
        exchanges = zip(work.table.types, map(len, work.table.inputs), strict=True)
        residents = Residents(
            in_use,
            tuple(pending),
            constant_bytes(work.table, work.outputs, work.place),
            self._fusion.pending_bytes(exchanges, work.device.type, in_use),
        )
        return replace(work, residents=residents)


class Bounding:
    """Finds steps that need no plan: without reading them, which is most of the work of an edit.

    A step fits for certain where all tensors that it ever makes have room side by side.
    """

    name = "bound"

    def __init__(self, host: HostVariables) -> None:
        self._host = host

    def requires(self, work: Work) -> bool:
        """Tell whether the policy leaves alone what fits."""
        task = work.task
        leaves = task.config.policy in LEAVES_WHAT_FITS and (task.may_be_whole or not task.compiled)
        is_as_it_was = task.specialised.sums is None  # else what runs without an edit is another graph
        return bool(work.outputs) and leaves and is_as_it_was and not self._host.is_on

    def apply(self, work: Work) -> Work:
        """Say whether the step fits, or the device has no known limit."""
        assert work.table is not None  # noqa: S101 - Parsing went before
        room = usable_bytes(work.task.config, work.limit_bytes)
        most = None if room is None else most_bytes(work.table, work.outputs, work.place)
        fits = room is None or (most is not None and most <= room)
        return replace(work, fits=fits, whole=fits and work.task.compiled)


class Streaming:
    """Has variables stream whose values lie in host memory between steps."""

    name = "stream"

    def __init__(self, host: HostVariables, transport: Callable[[], Transport]) -> None:
        self._host, self._transport = host, transport

    def requires(self, work: Work) -> bool:
        """Tell whether any variables stream; none do in a step that was postponed before they did."""
        return self._host.streams and work.frame is not None and work.graph_def is not None

    def apply(self, work: Work) -> Work:
        """Edit a copy of the graph, and read it again."""
        assert work.table is not None  # noqa: S101 - Parsing went before
        item, config = work.task.request.item, work.task.config
        known = variables_known(work.table, work.task.inputs)
        if work.frame != ROOT:
            return replace(work, streamed=Streamed(stay=variables_in_loop(work)))
        graph_def = graph_pb2.GraphDef()
        graph_def.CopyFrom(work.graph_def)
        fed = fed_nodes(work.task, graph_def)
        table = NodeTable.of(graph_def, fed)
        streamed = stream_variables(
            graph_def,
            table,
            work.outputs,
            self._transport(),
            self._host.values(),
            known,
            work.place.holds,
            self._host.share,
            config.min_tensor_bytes,
            item.fetches(),
        )
        if not streamed.nodes:
            return replace(work, streamed=streamed)
        edited = NodeTable.of(graph_def, fed)
        require_same_pairs(work.place.kernels, table, edited)
        before = dict(zip(table.names, work.outputs, strict=True))
        outputs = [streamed.outputs.get(name) or before.get(name, ()) for name in edited.names]
        return replace(work, graph_def=graph_def, streamed=streamed, table=edited, outputs=outputs)


def variables_in_loop(work: Work) -> dict[str, int]:
    """Count the variables of a frame that is not the root: none of them can stream."""
    least = max(1, work.task.config.min_tensor_bytes)
    large = sum(
        static_bytes(value_shape(handle), value_type(handle)) >= least
        for handle in variable_handles(work.task.inputs)
        if work.place.holds(handle.device)
    )
    return {IN_LOOP: large} if large else {}


def variables_known(table: NodeTable, inputs: Sequence[Any]) -> Mapping[str, Output]:
    """Return type and shape of the variables that a function is called with, by the names of their nodes."""
    found: dict[str, Output] = {}
    for node, op_type in enumerate(table.types):
        number = table.nodes[node].attr["index"].i if op_type == "_Arg" else len(inputs)
        if number < len(inputs):
            for handle in variable_handles([inputs[number]]):
                shape = value_shape(handle)
                dims = None if shape.rank is None else tuple(-1 if d is None else d for d in shape.as_list())
                found[table.names[node]] = Output(value_type(handle).as_datatype_enum, dims)
    return found


def hold(
    table: NodeTable,
    outputs: Sequence[Sequence[Output]],
    place: Place,
    frame: int,
    kept: Collection[str],
    min_bytes: int,
) -> tuple[NodeTable, int]:
    """Have shapes told at once; hold back what a condition's ops could make early, and variables' updates.

    Args:
        table: The graph; its NodeDefs are changed.
        outputs: Type and shape of the outputs of each node.
        place: The device that is planned.
        frame: The frame that is planned.
        kept: The names of the nodes that are fed, fetched or run.
        min_bytes: Smaller tensors may be made at any time.

    Returns:
        The new table, and about how many bytes more the step may take without that.
    """
    table, shaped = tell_at_once(table, outputs, place, frame, kept, min_bytes)
    table, early = hold_back(table, outputs, frame, min_bytes)
    table, copied = delay_updates(table, outputs, place, frame)
    return table, shaped + early + copied


class Holding:
    """Has ops run when they should for the memory: those that tell shapes, of conditions, and updates."""

    name = "hold"

    def requires(self, work: Work) -> bool:
        """Tell whether a frame has been chosen, and there is a graph to edit."""
        return work.frame is not None and work.graph_def is not None

    def apply(self, work: Work) -> Work:
        """Add control edges to the graph and its table."""
        assert work.table is not None  # noqa: S101 - Parsing went before
        least, frame = work.task.config.min_tensor_bytes, work.frame or ROOT
        kept, specialised = kept_nodes(work.task, work.graph_def), work.task.specialised
        sums = work.sums if specialised.sums is None else specialised.sums
        if sums is None and has_long_sums(work.table) and late_shapes(work.table):
            sums = named_beginnings(read_step(work.table, work.outputs, work.place, frame, work.fetches))
        table, held = hold(work.table, work.outputs, work.place, frame, kept, least)
        return replace(work, table=table, held_bytes=work.held_bytes + held, sums=sums)


class Reading:
    """Reads the frame into values."""

    name = "read"

    def requires(self, work: Work) -> bool:
        """Tell whether a frame has been chosen."""
        return work.frame is not None

    def apply(self, work: Work) -> Work:
        """Add the frame as a step of plain values."""
        assert work.table is not None  # noqa: S101 - Parsing went before
        step = read_step(work.table, work.outputs, work.place, work.frame or 0, work.fetches)
        return replace(work, step=step)


class Filtering:
    """Marks the tensors that the configuration's filters keep on the device."""

    name = "filters"

    def requires(self, work: Work) -> bool:
        """Tell whether there is a step."""
        return work.step is not None

    def apply(self, work: Work) -> Work:
        """Add the graph with the filters applied, and the names that match nothing."""
        assert work.step is not None  # noqa: S101 - required
        selection = select(work.step.graph, work.task.config)
        return replace(work, graph=selection.graph, unmatched=selection.unmatched)


class Writing:
    """Writes the plan into the graph."""

    name = "write"

    def __init__(self, transport: Callable[[], Transport], rooms: Rooms) -> None:
        self._transport, self._rooms = transport, rooms

    def requires(self, work: Work) -> bool:
        """Tell whether the plan changes anything."""
        if work.decision is None or work.whole:
            return False
        decided, limit = work.decision, work.limit_bytes
        if work.streamed.nodes or decided.segmentation or not decided.plan.is_empty:
            return True
        if work.task.specialised.sums is not None:  # it takes what is planned only without its conditions
            return True
        return bool(work.held_bytes) and limit is not None and decided.peak_bytes + work.held_bytes > limit

    def apply(self, work: Work) -> Work:
        """Write the plan's nodes into the GraphDef, and make room for small buffers and batches."""
        assert work.decision is not None and work.step is not None  # noqa: S101 - required
        decided, transport = work.decision, self._transport()
        streamed = work.streamed
        transport.require_room(work.stored_bytes)
        edits = write_decision(work.graph_def, work.step, decided, transport, work.sums)
        edits = replace(edits, nodes=(*edits.nodes, *streamed.nodes))
        small, batches = rooms_of(decided.case, decided.plan, work.limit_bytes)
        self._rooms.make_small(small, work.device.name, work.residents.pending)
        self._rooms.make_for_batches(batches, work.device.name)
        return replace(work, edits=edits)


class Validating:
    """Checks the edited graph, for TensorFlow would silently run a step with a bad one unoptimized."""

    name = "validate"

    def requires(self, work: Work) -> bool:
        """Tell whether the graph was changed."""
        return work.edits is not None

    def apply(self, work: Work) -> Work:
        """Raise an error if the edited graph is not valid."""
        assert work.table is not None and work.edits is not None  # noqa: S101 - required
        validate(work.graph_def, work.table, work.outputs, work.edits.nodes, work.place.kernels)
        return work


def fed_nodes(task: Task, graph_def: Any) -> set[str]:
    """Return the nodes in whose place a session feeds values.

    They are those that its call tells, and those that TensorFlow must preserve and does not fetch. A function
    has arguments instead, and there the preserved nodes are those with effects.
    """
    if any(node.op == "_Arg" for node in graph_def.node):
        return set()
    item = task.request.item
    fetched = {name.partition(":")[0] for name in item.fetches()}
    return {*task.hints.feeds}.union(set(item.preserved()) - fetched)


def kept_nodes(task: Task, graph_def: Any) -> set[str]:
    """Return the nodes that are fed, fetched or run, or that TensorFlow must preserve."""
    item = task.request.item
    fetched = {name.partition(":")[0] for name in item.fetches()}
    return fetched.union(item.preserved(), fed_nodes(task, graph_def))


def arguments_of(table: NodeTable, names: Collection[str]) -> Iterator[int]:
    """Yield the numbers of the arguments whose nodes have these names."""
    for name in names:
        if table.types[table.number[name]] == "_Arg":
            yield table.nodes[table.number[name]].attr["index"].i


def is_edited(graph_def: Any, serialised: bytes) -> bool:
    """Tell whether a graph holds nodes of an earlier edit."""
    return MARK_ATTR.encode() in serialised and any(MARK_ATTR in node.attr for node in graph_def.node)


ONLY_READ = frozenset({"LmsGetHostValue", "ReadVariableOp"})


def _changed_arguments(table: NodeTable) -> Iterator[int]:
    """Yield the numbers of the arguments that a graph does more with than read them."""
    for node, op_type in enumerate(table.types):
        if op_type == "_Arg" and not ONLY_READ.issuperset(_uses(table, node)):
            yield table.nodes[node].attr["index"].i


def _changed_handles(table: NodeTable, is_planned: Callable[[str], bool]) -> Iterator[int]:
    """Yield the nodes of a device's variables that a session's graph does more with than read them."""
    for node, op_type in enumerate(table.types):
        if op_type == "VarHandleOp" and is_planned(table.nodes[node].device):
            if not ONLY_READ.issuperset(_uses(table, node)):
                yield node


def _uses(table: NodeTable, node: int) -> Iterator[str]:
    """Yield the types of the ops that read a node, also inside of loops."""
    for reader, _ in table.readers[node]:
        if table.types[reader] in ENTERS:
            yield from _uses(table, reader)
        else:
            yield table.types[reader]


@dataclass(frozen=True)
class Passes:
    """The passes over a graph, in their order."""

    parse: Pass
    survey: Sequence[Pass]
    """Over the whole graph, for each device."""
    plan: Sequence[Pass]
    """Over each frame, up to its plan."""
    write: Sequence[Pass]


def standard_passes(
    counting: Counting,
    host: HostVariables,
    transport: Callable[[], Transport],
    rooms: Rooms,
    bandwidth_gb_s: float | None,
    claim: PoolClaim,
    profiles: Callable[[], Profiles],
    load_fillers: Callable[[], bool],
    load_assignment: Callable[[], bool],
) -> Passes:
    """Return the passes of an engine."""
    return Passes(
        Parsing(),
        (Shaping(), counting, Bounding(host)),
        (
            *(Holding(), Streaming(host, transport), Reading(), Filtering(), counting),
            Planning(bandwidth_gb_s, claim, transport, profiles, load_fillers, load_assignment),
        ),
        (Writing(transport, rooms), Validating()),
    )
