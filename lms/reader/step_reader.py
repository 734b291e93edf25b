"""Read one frame of a graph into values (:mod:`lms.ir.graph`), and keep the nodes behind them."""

import functools
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Any

import tensorflow as tf

from lms.device.kernels import Kernels, OpFacts, Reader, Shape
from lms.errors import UnreadableError
from lms.ir.graph import Graph, GraphBuilder
from lms.ir.liveness import Buffers, round_up, timeline
from lms.ir.op_traits import (
    OUTSIDE_TYPES,
    SHAPE_READERS,
    STREAM_ENTER,
    STREAM_OUT,
    STREAM_TYPES,
    UNSWAPPABLE_TYPES,
    is_backward,
    is_collective,
    is_update,
)
from lms.optimizer.grappler_item import Output
from lms.reader.arithmetic import flops_of, is_counted
from lms.reader.conditions import ALWAYS, Conditions, find_conditions
from lms.reader.folded_constants import CONSTANTS, Folded, find_folded
from lms.reader.node_table import ENTERS, EXITS, MERGES, ROOT, SWITCHES, TURNS, NodeTable, Source
from lms.reader.shapes import TINY

LOOP = "Loop"
"""The type of the op that stands for a loop within the frame that is read."""

RESULTS = frozenset({"_Retval", "_DeviceRetval"})
NOT_PLAIN = frozenset(dtype.as_datatype_enum for dtype in (tf.resource, tf.variant, tf.string))
VARIANT = tf.variant.as_datatype_enum
MARK_ATTR = "_lms"
"""Attribute of every node that an edit has added; its value says what the node is for."""
STREAMED = "a variable's, which leaves the device as such"
"""The reason why a buffer stays that a variable has on the device for an update."""
ARRIVES = "another device makes it"
"""The reason why the copy of a tensor stays that comes to the device for its readers there."""
KEPT = "a kernel keeps it for another one"
"""The reason why a buffer stays that TensorFlow's graph does not show."""
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
"""Where functions that are called and not taken in keep their bodies."""


@dataclass(frozen=True)
class Step:
    """A frame of a graph as values, and the nodes behind them."""

    graph: Graph
    table: NodeTable
    members: tuple[tuple[int, ...], ...]
    """The nodes that each op stands for, the one whose name it has first."""
    slots: tuple[tuple[tuple[int, int], ...], ...]
    """For each op the node and input behind each of its own inputs; what a kernel keeps has none."""
    starts: tuple[tuple[int, ...], ...]
    """The nodes that have to wait where an op has to."""
    ends: tuple[tuple[int, ...], ...]
    """The nodes to wait for where an op is waited for."""
    sources: tuple[Source | None, ...]
    """The node's output behind each tensor; ``None`` for what a kernel keeps beside its outputs."""
    dtypes: Mapping[Source, int]
    unknown: tuple[str, ...] = ()
    """Names of the tensors whose size is not known."""
    list_loops: tuple[str, ...] = ()
    """Names of the loops that keep lists for their backward pass, which are in no plan."""
    varies: bool = False
    """Whether only a run tells how often the step is made: it is in a loop or in a branch."""


@dataclass(frozen=True)
class Place:
    """A device: which nodes run there, and how much memory its kernels need."""

    holds: Callable[[str], bool]
    """Whether a node with this device name runs on the device."""
    kernels: Kernels
    device_type: str = "CPU"
    on_host: Callable[[Any, int], bool] = lambda node, index: False
    """Whether a node of the device leaves an output in host memory."""
    reads_on_host: Callable[[Any, int], bool] = lambda node, slot: False
    """Whether a node of the device reads an input in host memory."""
    body_peak: "Callable[[Place, Any, str, Sequence[Output]], int] | None" = None
    """The memory that a function needs which a node calls with such arguments."""


def step_frames(table: NodeTable, *, whole: bool = False) -> list[int]:
    """Find the frames that hold a training step: gradients, and updates of variables if there are any.

    With ``whole``, a frame with gradients alone is no step. Of frames within each other the outer one is the
    step: in it the loops of recurrent layers are one op each.
    """
    gradients = Counter(
        table.frame[node]
        for node, op_type in enumerate(table.types)
        if op_type not in CONSTANTS and is_backward(table.names[node], op_type)
    )
    updates = {table.frame[node] for node, op_type in enumerate(table.types) if is_update(op_type)}
    chosen: list[int] = []
    for frame in sorted(gradients.keys() & updates or (() if whole else gradients)):
        if not any(table.is_within(frame, one) for one in chosen):
            chosen.append(frame)
    return chosen


def read_step(
    table: NodeTable,
    outputs: Sequence[Sequence[Output]],
    place: Place,
    frame: int = ROOT,
    fetches: Collection[str] = (),
) -> Step:
    """Read a frame of a graph.

    Args:
        table: The graph.
        outputs: Type and shape of the outputs of each node.
        place: The device whose memory is planned.
        frame: Number of the frame.
        fetches: Names of further outputs that outlive the step.

    Raises:
        UnreadableError: If the frame is none that runs from inputs to outputs.
    """
    units = _Units.of(table, frame, place.kernels)
    reader = _Reader(table, outputs, place, frame, units, find_conditions(table, frame))
    for unit in units.order():
        reader.add(unit)
    return reader.step(fetches)


def constant_bytes(table: NodeTable, outputs: Sequence[Sequence[Output]], place: Place) -> int:
    """Return the bytes of the device that a graph's constants take for good: their kernels hold them."""
    held = folded(table, outputs).held
    return sum(
        round_up(size_of(output) or 0)
        for node, op_type in enumerate(table.types)
        if (op_type in CONSTANTS or node in held) and place.holds(table.nodes[node].device)
        for output in outputs[node]
    )


def most_bytes(table: NodeTable, outputs: Sequence[Sequence[Output]], place: Place) -> int | None:
    """Return the bytes of all that a graph makes on a device: no order of its ops needs more.

    ``None`` where that is not known: a size is open, or ops run in a loop or in a function that is called.
    """
    if len(table.frames) > 1 or not BODY_ATTRS.keys().isdisjoint(table.types):
        return None
    total = workspace = 0
    for node, made in enumerate(outputs):
        is_here = place.holds(table.nodes[node].device)
        if not is_here and not any(place.holds(table.nodes[to].device) for to, _ in table.readers[node]):
            continue
        sizes = [size_of(output) for output in made]
        if is_here and table.types[node] in place.kernels.types:
            facts = facts_of(table, outputs, node)
            workspace = max(workspace, place.kernels.workspace_bytes(facts))
            for extra in place.kernels.extra_outputs(facts):
                sizes += [extra.nbytes]
                if extra.output is not None:
                    sizes[extra.output] = sizes.pop()
        for nbytes in sizes:
            if nbytes is None:
                return None
            total += round_up(nbytes)
    return total + round_up(workspace)


def folded(table: NodeTable, outputs: Sequence[Sequence[Output]]) -> Folded:
    """Find the nodes that TensorFlow computes once, when it prepares a graph."""
    return find_folded(table, lambda node: sum(size_of(output) or 0 for output in outputs[node]))


def size_of(output: Output) -> int | None:
    """Return the bytes of an output: 0 where its memory is not plain, ``None`` where its shape is open."""
    item = item_bytes(output.dtype)
    if not item:
        return 0
    if output.dims is None:
        return None
    total = item
    for dim in output.dims:
        if dim < 0:
            return None
        total *= dim
    return total


@functools.cache
def item_bytes(dtype: int) -> int:
    """Return the bytes of an element of a type, which TensorFlow numbers; 0 where its memory is not plain."""
    return 0 if dtype in NOT_PLAIN or not dtype else int(tf.as_dtype(dtype).size)


@dataclass
class _Units:
    """The units of a frame, each of which becomes one op: a node, two that one kernel computes, or a loop."""

    table: NodeTable
    frame: int
    of_node: dict[int, int] = field(default_factory=dict)
    """The unit of each node of the frame, by the number of the unit's first node."""
    members: dict[int, list[int]] = field(default_factory=dict)
    loops: dict[int, int] = field(default_factory=dict)
    """The frame of each unit that is a loop."""
    unordered: set[int] = field(default_factory=set)
    """Units that may get no control edge."""
    vanishing: set[int] = field(default_factory=set)
    """Nodes whose outputs never come into being."""

    @classmethod
    def of(cls, table: NodeTable, frame: int, kernels: Kernels) -> "_Units":
        units = cls(table, frame)
        tops: dict[int, int] = {}
        for node, op_type in enumerate(table.types):
            inner = table.frame[node]
            if op_type in EXITS and inner == frame:
                inner = table.frame[table.inputs[node][0].node]
            if inner == frame:
                units.of_node[node] = node
                units.members[node] = [node]
            elif inner != ROOT and table.is_within(inner, frame):
                while table.frames[inner].parent != frame:
                    inner = table.frames[inner].parent or ROOT
                unit = tops.setdefault(inner, node)
                units.of_node[node] = unit
                units.members.setdefault(unit, []).append(node)
                units.loops[unit] = inner
        for pair in kernels.pairs(table):
            first, second = pair.first, pair.second
            if units.of_node.get(first) == first and units.of_node.get(second) == second:
                units.of_node[second] = first
                units.members[first].append(second)
                del units.members[second]
                units.unordered |= {first} if pair.bare else set()
                units.vanishing |= {second} if pair.vanishes else set()
        return units

    def before(self, unit: int) -> set[int]:
        """Return the units that ``unit`` waits for."""
        table, of_node = self.table, self.of_node
        found = set()
        for node in self.members[unit]:
            is_merge = table.types[node] in MERGES
            for source in table.inputs[node]:
                if not (is_merge and table.types[source.node] in TURNS) and source.node in of_node:
                    found.add(of_node[source.node])
            found.update(of_node[control] for control in table.controls[node] if control in of_node)
        found.discard(unit)
        return found

    def order(self) -> Iterator[int]:
        """Yield the units, each after those that it waits for."""
        waiting: dict[int, int] = {}
        after: dict[int, list[int]] = {}
        for unit in self.members:
            before = self.before(unit)
            waiting[unit] = len(before)
            for other in before:
                after.setdefault(other, []).append(unit)
        ready = [unit for unit, count in waiting.items() if not count]
        heapify(ready)
        done = 0
        while ready:
            unit = heappop(ready)
            done += 1
            yield unit
            for later in after.get(unit, ()):
                waiting[later] -= 1
                if not waiting[later]:
                    heappush(ready, later)
        if done < len(self.members):
            raise UnreadableError("two ops that one kernel computes lead to each other")


class _Reader:
    def __init__(
        self,
        table: NodeTable,
        outputs: Sequence[Sequence[Output]],
        place: Place,
        frame: int,
        units: _Units,
        conditions: Conditions,
    ) -> None:
        self._table, self._outputs, self._place = table, outputs, place
        self._frame, self._units, self._conditions = frame, units, conditions
        self._build = GraphBuilder()
        self._ids: dict[Source, int] = {}
        self._op_of: dict[int, int] = {}
        self._kept_for: dict[Source, list[tuple[int, tuple[Reader, ...]]]] = {}
        """By a node's output what its kernel keeps beside it, and for which readers."""
        self._streamed: dict[int, int] = {}
        """By the node of a variable's handle the buffer that the variable has on the device for now."""
        self._columns: tuple[list[Any], ...] = ([], [], [], [])
        """Members, slots, starts and ends of each op."""
        self._sources: list[Source | None] = []
        self._unknown: list[str] = []
        self._retained: list[Source] = []
        self._names: set[str] = set()
        self._lists: dict[str, list[Source]] = {}
        self._list_loops: dict[str, None] = {}
        self._folded = folded(table, outputs).nodes

    def step(self, fetches: Collection[str]) -> Step:
        """Build the step from the units added so far."""
        for text in fetches:
            name, _, index = text.partition(":")
            self._retained.append(Source(self._table.number.get(name, -1), int(index or 0)))
        graph = self._build.build({self._ids[one] for one in self._retained if one in self._ids})
        dtypes = {
            source: self._outputs[source.node][source.index].dtype for source in self._sources if source
        }
        members, slots, starts, ends = map(tuple, self._columns)
        return Step(
            graph,
            self._table,
            members,
            slots,
            starts,
            ends,
            tuple(self._sources),
            dtypes,
            tuple(self._unknown),
            tuple(self._list_loops),
            varies=self._frame != ROOT or self._conditions.step != ALWAYS,
        )

    def add(self, unit: int) -> None:
        """Add the next unit.

        Raises:
            UnreadableError: If it reads what no node before it makes.
        """
        try:
            if unit in self._units.loops:
                self._add_loop(unit)
            else:
                self._add_node(unit)
        except (KeyError, IndexError) as error:
            name = self._table.names[unit]
            raise UnreadableError(f"{name} reads an output that no node makes ({error!r})") from error

    def _add_node(self, unit: int) -> None:
        table, kernels = self._table, self._place.kernels
        members = self._units.members[unit]
        op_type, node = table.types[unit], table.nodes[unit]
        slots = [slot for member in members for slot in self._slots(member, members)]
        read = [table.inputs[member][slot] for member, slot in slots]
        waits = [control for member in members for control in table.controls[member]]
        if op_type in SHAPE_READERS:
            waits += [source.node for source in table.inputs[unit]]
        away = op_type in ENTERS or op_type in OUTSIDE_TYPES or not self._place.holds(node.device)
        away = away or unit in self._folded
        sources = [Source(member, index) for member in members for index in range(len(self._outputs[member]))]
        outside = [away or self._is_outside(source) for source in sources]
        sizes = [self._size(op_type, source) for source in sources]
        reasons: list[str | None] = [self._forbidden(op_type, source) for source in sources]
        for source in self._arriving(unit, sources):
            slot = sources.index(source)
            outside[slot], reasons[slot] = False, reasons[slot] or ARRIVES
        inputs = [self._ids[source] for source in read]
        facts = None if away or op_type not in kernels.types else facts_of(table, self._outputs, unit)
        beside: list[tuple[Reader, ...]] = []
        if facts is not None:
            for extra in kernels.extra_outputs(facts):
                reasons[0] = reasons[0] or extra.pins
                if extra.output is not None:
                    sizes[extra.output] = extra.nbytes
                    continue
                sizes.append(extra.nbytes)
                outside.append(False)
                reasons.append(KEPT)
                beside.append(extra.readers)
        held = self._streamed_by(slots) if self._streamed else []
        counted = not away and is_counted(op_type)
        aliases = self._aliases(op_type, facts)
        purpose = self._purpose(node)
        if held and op_type == "ReadVariableOp":
            aliases, outside, reasons = (len(inputs),), [False], [STREAMED]
        elif purpose == STREAM_ENTER:
            aliases, outside, reasons, sizes = (1,), [False], [STREAMED], [0]
        elif purpose == STREAM_OUT:
            outside = [True]
        made = self._build.add(
            self._unique(table.bare_name(unit), unit),
            purpose or op_type,
            inputs=[*inputs, *held, *self._kept_by(slots)],
            outputs=sizes,
            controls=self._controls(unit, waits),
            aliases=aliases,
            in_place=None if facts is None else kernels.in_place_slots(facts),
            outside=outside,
            forbidden=reasons,
            workspace_bytes=self._workspace(unit, facts),
            flops=flops_of(facts or facts_of(table, self._outputs, unit)) if counted else None,
            chainable=not (is_collective(op_type) or op_type in RESULTS),
            conditional=self._is_conditional(unit),
            parts=merged_types(op_type, node),
        )
        if op_type in BODY_ATTRS:
            self._note_lists(table.bare_name(unit), read, sources)
        self._note_unknown(sources, sizes, outside)
        self._record(unit, members, slots, members, members)
        for tensor, source in zip(made, sources, strict=False):
            self._ids[source] = tensor
        if purpose == STREAM_ENTER:
            self._streamed[table.inputs[unit][0].node] = made[0]
            self._sources.append(None)
        for tensor, readers in zip(made[len(sources) :], beside, strict=False):
            self._kept_for.setdefault(Source(unit, 0), []).append((tensor, readers))
        self._sources += [*sources, *([None] * len(beside))]
        if op_type in RESULTS:
            self._retained += read

    def _purpose(self, node: Any) -> str | None:
        """Return the type of an op that streams a variable; ``None`` for other nodes."""
        if MARK_ATTR not in node.attr:
            return None
        purpose: str = node.attr[MARK_ATTR].s.decode()
        return purpose if purpose in STREAM_TYPES else None

    def _streamed_by(self, slots: Sequence[tuple[int, int]]) -> list[int]:
        """Return the buffers that an op uses through the handles of variables."""
        read = dict.fromkeys(self._table.inputs[node][slot].node for node, slot in slots)
        return [self._streamed[node] for node in read if node in self._streamed]

    def _aliases(self, op_type: str, facts: OpFacts | None) -> Sequence[int | None] | None:
        """Return the input slot that each output shares a buffer with; ``None``: the op type decides."""
        if op_type in SWITCHES:
            return (0, 0)
        return None if facts is None else self._place.kernels.alias_slots(facts)

    def _slots(self, node: int, members: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yield the inputs of a node that its op reads: not those that another node of the op makes."""
        types = self._table.types
        if types[node] in ENTERS or types[node] in SHAPE_READERS:
            return
        for slot, source in enumerate(self._table.inputs[node]):
            next_turn = types[node] in MERGES and types[source.node] in TURNS
            if source.node not in members and not next_turn:
                yield node, slot

    def _arriving(self, unit: int, sources: Sequence[Source]) -> Iterator[Source]:
        """Yield the outputs of another device's node that the device reads.

        TensorFlow makes one copy of each for all readers there, as soon as the output is made.
        """
        table, holds = self._table, self._place.holds
        kept = (
            table.types[unit] in OUTSIDE_TYPES or unit in self._folded or MARK_ATTR in table.nodes[unit].attr
        )
        if kept or holds(table.nodes[unit].device):
            return
        for source in sources:
            if any(
                table.inputs[reader][slot] == source
                and holds(table.nodes[reader].device)
                and not self._place.reads_on_host(table.nodes[reader], slot)
                for reader, slot in table.readers[source.node]
            ):
                yield source

    def _is_outside(self, source: Source) -> bool:
        return source.node in self._units.vanishing or self._place.on_host(
            self._table.nodes[source.node], source.index
        )

    def _add_loop(self, unit: int) -> None:
        """Add a loop within the frame as one op; its workspace is the peak of its body."""
        table, members = self._table, self._units.members[unit]
        frame = self._units.loops[unit]
        enters = [node for node in members if table.types[node] in ENTERS and table.frame[node] == frame]
        exits = [node for node in members if table.types[node] in EXITS and table.frame[node] == self._frame]
        slots = [(node, 0) for node in enters]
        read = [table.inputs[node][0] for node in enters]
        waits = [control for node in enters for control in table.controls[node] if control in self._op_of]
        sources = [Source(node, 0) for node in exits]
        away = not any(self._place.holds(table.nodes[node].device) for node in exits)
        sizes = [self._size(LOOP, source) for source in sources]
        name = self._unique(table.frames[frame].name, unit)
        self._note_lists(name, read, sources)
        turning = [node for node in enters if not table.nodes[node].attr["is_constant"].b]
        made = self._build.add(
            name,
            LOOP,
            inputs=[self._ids[source] for source in read],
            outputs=sizes,
            controls=self._controls(unit, waits),
            outside=away,
            forbidden=[self._forbidden(LOOP, source) for source in sources],
            workspace_bytes=0 if away else self._body_peak(frame),
            chainable=bool(turning and exits),
            conditional=not self._conditions.loop_runs_with_step(unit),
        )
        self._note_unknown(sources, sizes, [away] * len(sizes))
        self._record(unit, members, slots, turning, exits[:1])
        for tensor, source in zip(made, sources, strict=True):
            self._ids[source] = tensor
        self._sources += sources

    def _note_lists(self, name: str, read: Sequence[Source], made: Sequence[Source]) -> None:
        """Note the ops whose lists a later op reads; they are loops, or functions with one.

        A forward pass hands all of its lists over in one variant.
        """
        for source in read:
            for maker, lists in self._lists.items():
                if source in lists:
                    self._list_loops[maker] = None
        self._lists[name] = [s for s in made if self._outputs[s.node][s.index].dtype == VARIANT]

    def _body_peak(self, frame: int) -> int:
        body = read_step(self._table, self._outputs, self._place, frame)
        return timeline(Buffers.of(body.graph), range(len(body.graph.ops))).peak_bytes

    def _record(
        self,
        unit: int,
        members: Sequence[int],
        slots: Sequence[tuple[int, int]],
        starts: Sequence[int],
        ends: Sequence[int],
    ) -> None:
        op = len(self._columns[0])
        for node in members:
            self._op_of[node] = op
        for column, value in zip(self._columns, (members, slots, starts, ends), strict=True):
            column.append(tuple(value))

    def _controls(self, unit: int, waits: Sequence[int]) -> list[int]:
        mine = self._units.of_node
        return [
            self._op_of[control] for control in waits if control in self._op_of and mine.get(control) != unit
        ]

    def _unique(self, name: str, unit: int) -> str:
        chosen = self._table.names[unit] if name in self._names else name
        self._names.add(chosen)
        return chosen

    def _is_conditional(self, unit: int) -> bool:
        """Tell whether a unit runs under other conditions than the step, or may get no control edge."""
        return unit in self._units.unordered or not self._conditions.runs_with_step(unit)

    def _size(self, op_type: str, source: Source) -> int | None:
        return 0 if op_type in TINY else size_of(self._outputs[source.node][source.index])

    def _note_unknown(
        self, sources: Sequence[Source], sizes: Sequence[int | None], outside: Sequence[bool]
    ) -> None:
        for source, size, gone in zip(sources, sizes, outside, strict=False):
            if size is None and not gone:
                self._unknown.append(f"{self._table.bare_name(source.node)}:{source.index}")

    def _forbidden(self, op_type: str, source: Source) -> str | None:
        if op_type.startswith("Lms"):
            return "swapped already"
        if not item_bytes(self._outputs[source.node][source.index].dtype):
            return "not plain memory"
        return UNSWAPPABLE_TYPES.get(op_type)

    def _kept_by(self, slots: Sequence[tuple[int, int]]) -> list[int]:
        """Return the tensors that the makers of an op's inputs keep for it."""
        table = self._table
        return [
            tensor
            for node, slot in slots
            for tensor, readers in self._kept_for.get(table.inputs[node][slot], ())
            if (table.types[node], slot) in readers
        ]

    def _workspace(self, unit: int, facts: OpFacts | None) -> int:
        needed = 0 if facts is None else self._place.kernels.workspace_bytes(facts)
        op_type, node = self._table.types[unit], self._table.nodes[unit]
        peak_of = self._place.body_peak
        if op_type not in BODY_ATTRS or peak_of is None or not self._place.holds(node.device):
            return needed
        read = [self._outputs[source.node][source.index] for source in self._table.inputs[unit]]
        names = [name for attr in BODY_ATTRS[op_type] for name in _body_names(node, attr)]
        return max([needed, *(peak_of(self._place, node, name, read) for name in names)])


def facts_of(table: NodeTable, outputs: Sequence[Sequence[Output]], node: int) -> OpFacts:
    """Describe a node by the facts that the kernels of a device depend on."""
    read = [outputs[source.node][source.index] for source in table.inputs[node]]
    readers = ((one, slot) for one, slot in table.readers[node] if table.inputs[one][slot].index == 0)
    return OpFacts(
        type=table.types[node],
        input_bytes=tuple(map(size_of, read)),
        output_bytes=tuple(map(size_of, outputs[node])),
        input_shapes=tuple(map(_shape, read)),
        output_shapes=tuple(map(_shape, outputs[node])),
        attrs=_Attrs(table, node),
        readers=tuple(Reader(table.types[one], slot) for one, slot in readers),
        makers=tuple(table.types[source.node] for source in table.inputs[node]),
    )


def merged_types(op_type: str, node: Any) -> tuple[str, ...]:
    """Return the types of the ops that TensorFlow's remapper has merged into one."""
    if not op_type.startswith("_Fused"):
        return ()
    if op_type == "_FusedBatchNormEx":
        return "FusedBatchNormV3", node.attr["activation_mode"].s.decode()
    return op_type.removeprefix("_Fused"), *(one.decode() for one in node.attr["fused_ops"].list.s)


def _body_names(node: Any, attr: str) -> list[str]:
    value = node.attr[attr]
    return [value.func.name] if value.HasField("func") else [func.name for func in value.list.func]


def _shape(output: Output) -> Shape:
    return None if output.dims is None else tuple(None if dim < 0 else dim for dim in output.dims)


class _Attrs(Mapping[str, object]):
    """The attributes of a node as plain values, each read when it is asked for."""

    def __init__(self, table: NodeTable, node: int) -> None:
        self._table, self._node = table, node

    def __getitem__(self, name: str) -> object:
        found = self._table.attr(self._node, name)
        if found is None:
            raise KeyError(name)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._table.nodes[self._node].attr)

    def __len__(self) -> int:
        return len(self._table.nodes[self._node].attr)
