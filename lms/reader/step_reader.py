"""Read one frame of a graph into values (:mod:`lms.ir.graph`), and keep the nodes behind them."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lms.device.arithmetic import flops_of, is_counted
from lms.device.kernels import OpFacts, Reader
from lms.errors import UnreadableError
from lms.ir.graph import Graph, GraphBuilder
from lms.ir.liveness import Buffers, timeline
from lms.ir.op_traits import (
    EXIT,
    HOLDS_OPERANDS,
    MERGES,
    OUTSIDE_TYPES,
    SHAPE_READERS,
    STACKED,
    STREAM_ENTER,
    STREAM_OUT,
    STREAM_TYPES,
    UNSWAPPABLE_TYPES,
    is_collective,
)
from lms.optimizer.grappler_item import Output
from lms.reader.conditions import ALWAYS, Conditions, find_conditions
from lms.reader.loop_lists import STACK, VARIANT, list_bytes
from lms.reader.node_table import ENTERS, EXITS, HANDED_ON, ROOT, SWITCHES, TURNS, NodeTable, Source
from lms.reader.op_facts import facts_of, item_bytes, merged_types, size_of
from lms.reader.shapes import TINY
from lms.reader.survey import BODY_ATTRS, Place, exchanging, folded, in_place_assignments
from lms.reader.units import Units

LOOP = "Loop"
"""The type of the op that stands for a loop within the frame that is read."""

RESULTS = frozenset({"_Retval", "_DeviceRetval"})
UNREAD = ENTERS | SHAPE_READERS
"""Types of nodes that read no bytes of their inputs within the frame."""
STREAMED = "a variable's, which leaves the device as such"
"""The reason why a buffer stays that a variable has on the device for an update."""
ARRIVES = "another device makes it"
"""The reason why the copy of a tensor stays that comes to the device for its readers there."""
KEPT = "a kernel keeps it for another one"
"""The reason why a buffer stays that TensorFlow's graph does not show."""


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
    conditions: Conditions
    """Those of the nodes of the table that was read."""
    unknown: tuple[str, ...] = ()
    """Names of the tensors whose size is not known."""
    list_loops: tuple[str, ...] = ()
    """Names of the loops that keep lists of unknown size for their backward pass, which are in no plan."""
    varies: bool = False
    """Whether only a run tells how often the step is made: it is in a loop or in a branch."""


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
    units = Units.of(table, frame, place.kernels)
    reader = _Reader(table, outputs, place, frame, units, find_conditions(table, frame))
    for unit in units.order():
        reader.add(unit)
    return reader.step(fetches)


class _Reader:
    def __init__(
        self,
        table: NodeTable,
        outputs: Sequence[Sequence[Output]],
        place: Place,
        frame: int,
        units: Units,
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
        self._stacked: dict[int, list[int]] = {}
        """By the node that stacks a list of a loop this list and those that were stacked before."""
        self._members: list[tuple[int, ...]] = []
        self._slots_of: list[tuple[tuple[int, int], ...]] = []
        self._starts: list[tuple[int, ...]] = []
        self._ends: list[tuple[int, ...]] = []
        self._sources: list[Source | None] = []
        self._unknown: list[str] = []
        self._retained: list[Source] = []
        self._names: set[str] = set()
        self._list_bytes = list_bytes(table, outputs)
        self._lists: dict[str, list[Source]] = {}
        self._list_loops: dict[str, None] = {}
        self._folded = folded(table, outputs).nodes
        self._here = place.holds_each(table)
        self._in_place = in_place_assignments(table, outputs, place)
        self._exchanging = exchanging(table)

    def step(self, fetches: Collection[str]) -> Step:
        """Build the step from the units added so far."""
        for text in fetches:
            name, _, index = text.partition(":")
            self._retained.append(Source(self._table.number.get(name, -1), int(index or 0)))
        graph = self._build.build({self._ids[one] for one in self._retained if one in self._ids})
        dtypes = {
            source: self._outputs[source.node][source.index].dtype for source in self._sources if source
        }
        return Step(
            graph,
            self._table,
            tuple(self._members),
            tuple(self._slots_of),
            tuple(self._starts),
            tuple(self._ends),
            tuple(self._sources),
            dtypes,
            self._conditions,
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
        op_type, is_here = table.types[unit], self._here[unit]
        slots = self._slots(members)
        read = [table.inputs[member][slot] for member, slot in slots]
        waits = [control for member in members for control in table.controls[member]]
        if op_type in SHAPE_READERS:
            waits += [source.node for source in table.inputs[unit]]
        away = not is_here or op_type in ENTERS or op_type in OUTSIDE_TYPES or unit in self._folded
        sources = [Source(member, index) for member in members for index in range(len(self._outputs[member]))]
        outside = [away or self._is_outside(source) for source in sources]
        sizes, reasons = self._sizes_and_reasons(op_type, sources)
        for source in () if is_here else self._arriving(unit, sources):
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
        if table.marks.get(unit) == STACKED and op_type == STACK:
            held = self._lists_before(unit, inputs[0])
        counted = not away and is_counted(op_type)
        aliases = self._aliases(op_type, facts, len(sources))
        purpose = self._purpose(unit) if is_here else None
        if held and op_type == "ReadVariableOp":
            aliases, outside, reasons = (len(inputs),), [False], [STREAMED]
        elif purpose == STREAM_ENTER:
            aliases, outside, reasons, sizes = (1,), [False], [STREAMED], [0]
        elif purpose == STREAM_OUT:
            outside = [True]
        made = self._build.add(
            self._unique(table.bare_name(unit), unit),
            purpose or op_type,
            inputs=[*inputs, *held, *(self._kept_by(slots) if self._kept_for else ())],
            outputs=sizes,
            controls=self._controls(unit, waits) if waits else (),
            aliases=aliases,
            in_place=None if facts is None else kernels.in_place_slots(facts),
            outside=outside,
            forbidden=reasons,
            workspace_bytes=self._workspace(unit, facts),
            flops=flops_of(facts or facts_of(table, self._outputs, unit)) if counted else None,
            chainable=not (is_collective(op_type) or op_type in RESULTS or unit in self._exchanging),
            conditional=not self._conditions.runs_with_step(unit),
            unordered=unit in self._units.unordered
            or not (table.marks.get(unit) == EXIT or self._conditions.may_be_ordered(unit)),
            parts=merged_types(op_type, table.nodes[unit]),
            assigns_in_place=unit in self._in_place,
            elsewhere=not is_here,
            holds_operands=is_here
            and self._place.device_type == "GPU"
            and op_type.startswith(HOLDS_OPERANDS),
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

    def _purpose(self, unit: int) -> str | None:
        """Return the type of an op that streams a variable; ``None`` for other nodes."""
        purpose = self._table.marks.get(unit)
        return purpose if purpose in STREAM_TYPES else None

    def _streamed_by(self, slots: Sequence[tuple[int, int]]) -> list[int]:
        """Return the buffers that an op uses through the handles of variables."""
        table = self._table
        made = (table.inputs[node][slot].node for node, slot in slots if table.types[node] not in HANDED_ON)
        read = dict.fromkeys(map(table.handle, made))
        return [self._streamed[node] for node in read if node in self._streamed]

    def _lists_before(self, unit: int, read: int) -> list[int]:
        """Return the lists of the same loop that were stacked before one.

        Their tensors lie between those of the others, and leave no whole piece free until all are gone.
        """
        before = [one for node in self._table.controls[unit] for one in self._stacked.get(node, ())]
        self._stacked[unit] = [*before, read]
        return before

    def _aliases(self, op_type: str, facts: OpFacts | None, count: int) -> Sequence[int | None] | None:
        """Return the input slot that each output shares a buffer with; ``None``: the op type decides."""
        if op_type in SWITCHES:
            return (0,) * count
        return None if facts is None else self._place.kernels.alias_slots(facts)

    def _slots(self, members: Sequence[int]) -> list[tuple[int, int]]:
        """Return the inputs that an op reads: not those that a node of it makes, nor the next turn's."""
        types, inputs = self._table.types, self._table.inputs
        return [
            (node, slot)
            for node in members
            if types[node] not in UNREAD
            for slot, source in enumerate(inputs[node])
            if source.node not in members and not (types[source.node] in TURNS and types[node] in MERGES)
        ]

    def _arriving(self, unit: int, sources: Sequence[Source]) -> Iterator[Source]:
        """Yield the outputs of another device's node that the device reads.

        TensorFlow makes one copy of each for all readers there, as soon as the output is made.
        """
        table = self._table
        if table.types[unit] in OUTSIDE_TYPES or unit in self._folded or unit in table.marks:
            return
        for source in sources:
            if any(
                table.inputs[reader][slot] == source
                and self._here[reader]
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
        away = not any(self._here[node] for node in exits)
        sizes, reasons = self._sizes_and_reasons(LOOP, sources)
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
            forbidden=reasons,
            workspace_bytes=0 if away else self._body_peak(frame),
            chainable=bool(turning and exits) and self._exchanging.isdisjoint(members),
            elsewhere=away,
            conditional=not self._conditions.runs_with_step(unit),
            unordered=not self._conditions.runs_with_step(unit),
        )
        self._note_unknown(sources, sizes, [away] * len(sizes))
        self._record(unit, members, slots, turning, exits[:1])
        for tensor, source in zip(made, sources, strict=True):
            self._ids[source] = tensor
        self._sources += sources

    def _note_lists(self, name: str, read: Sequence[Source], made: Sequence[Source]) -> None:
        """Note the ops whose lists of unknown size a later op reads; they are loops, or functions with one.

        A forward pass hands all of its lists over in one variant.
        """
        for source in read:
            for maker, lists in self._lists.items():
                if source in lists:
                    self._list_loops[maker] = None
        self._lists[name] = [
            one
            for one in made
            if self._outputs[one.node][one.index].dtype == VARIANT and one not in self._list_bytes
        ]

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
        op = len(self._members)
        for node in members:
            self._op_of[node] = op
        self._members.append(tuple(members))
        self._slots_of.append(tuple(slots))
        self._starts.append(tuple(starts))
        self._ends.append(tuple(ends))

    def _controls(self, unit: int, waits: Sequence[int]) -> list[int]:
        mine = self._units.of_node
        return [
            self._op_of[control] for control in waits if control in self._op_of and mine.get(control) != unit
        ]

    def _unique(self, name: str, unit: int) -> str:
        chosen = self._table.names[unit] if name in self._names else name
        self._names.add(chosen)
        return chosen

    def _note_unknown(
        self, sources: Sequence[Source], sizes: Sequence[int | None], outside: Sequence[bool]
    ) -> None:
        for source, size, gone in zip(sources, sizes, outside, strict=False) if None in sizes else ():
            if size is None and not gone:
                self._unknown.append(f"{self._table.bare_name(source.node)}:{source.index}")

    def _sizes_and_reasons(
        self, op_type: str, sources: Sequence[Source]
    ) -> tuple[list[int | None], list[str | None]]:
        """Return the bytes of an op's outputs, and why each of them must not be swapped."""
        made = [self._outputs[node][index] for node, index in sources]
        sizes = [0 if op_type in TINY else size_of(output) for output in made]
        if self._list_bytes:
            sizes = [self._list_bytes.get(one, nbytes) for one, nbytes in zip(sources, sizes, strict=True)]
        if op_type.startswith("Lms"):
            return sizes, ["swapped already"] * len(made)
        reason = UNSWAPPABLE_TYPES.get(op_type)
        return sizes, [reason if item_bytes(output.dtype) else "not plain memory" for output in made]

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
        op_type, peak_of = self._table.types[unit], self._place.body_peak
        if op_type not in BODY_ATTRS or peak_of is None or not self._here[unit]:
            return needed
        node = self._table.nodes[unit]
        read = [self._outputs[source.node][source.index] for source in self._table.inputs[unit]]
        names = [name for attr in BODY_ATTRS[op_type] for name in _body_names(node, attr)]
        return max([needed, *(peak_of(self._place, node, name, read) for name in names)])


def _body_names(node: Any, attr: str) -> list[str]:
    value = node.attr[attr]
    return [value.func.name] if value.HasField("func") else [func.name for func in value.list.func]
