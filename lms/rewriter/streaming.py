"""Stream variables: their values lie in host memory between steps, and come to the device for their uses.

The variable itself stays where it is; what moves is the buffer that it holds
(:mod:`lms.variables.host_values`). Before the ops that update it a copy of the value comes to the device and
is assigned to the variable; behind them a copy goes to the host and is assigned in its turn. So between steps
whoever reads the variable reads host memory, and within a step the kernels are those that run without: same
device, same bits. What the forward and the backward pass read are copies of their own, each for its pass.

Optimizers read and update a variable late, when its gradient is there: copies for that wait for the gradient,
and for the copies out of the variables two gradients before. Copies for the passes wait for the op that reads
the variable two before. So a pass has a few variables on the device at once, each ahead of its use.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Any, TypeVar

import tensorflow as tf

from lms.ir.op_traits import (
    OUTSIDE_TYPES,
    STREAM_ENTER,
    STREAM_IN,
    STREAM_LAST,
    STREAM_LEAVE,
    STREAM_OUT,
    is_backward,
    is_update,
)
from lms.optimizer.grappler_item import Output
from lms.reader.node_table import MERGES, ROOT, TURNS, NodeTable
from lms.reader.step_reader import MARK_ATTR, RESULTS, size_of
from lms.rewriter.writer import MARK
from lms.transports.base import Transport
from lms.variables.host_values import ASSIGN, READ, HostValues, write_variable_op

RESOURCE = tf.resource.as_datatype_enum
HANDLES = frozenset({"_Arg", "VarHandleOp"})
READ_IN_PLACE = frozenset({"ResourceGather", "VarIsInitializedOp"})
"""Ops that read a variable where it lies, in host memory too."""
VALUE = "value"
"""The purpose of the node that reads a variable's value in host memory."""


@dataclass(frozen=True)
class Pace:
    """How far copies go ahead of the uses of variables; a *group* is some neighbours of about one size."""

    passes: int
    """The groups that lie on the device at once for the forward or the backward pass."""
    updates: int
    """The groups that lie on the device at once for their updates."""
    runs_on: bool
    """Whether the backward pass goes on while a group comes to its update."""


PACES = (
    Pace(2, 2, runs_on=True),
    Pace(2, 1, runs_on=True),
    Pace(1, 1, runs_on=True),
    Pace(1, 1, runs_on=False),
)
"""From the one that hides most of the copies to the one that needs least room."""

SMALL, OPEN = "smaller than min_tensor_bytes", "size is unknown"
IN_LOOP = "used in a loop or by a function that is called"
SUMMED = "a term of a sum whose order hangs on free buffers"
UNGATED = "its update waits for nothing that the step computes"
UNANCHORED = "nothing waits for its update"
"""Reasons why a variable stays on the device."""


@dataclass(frozen=True)
class Streamed:
    """The variables that were made to stream."""

    state: int = 0
    """Variables that only the update reads: an optimizer's."""
    weights: int = 0
    nbytes: int = 0
    """Of all of these variables."""
    bytes_in: int = 0
    """Copied to the device in one step."""
    bytes_out: int = 0
    copies_out: int = 0
    group_bytes: int = 0
    """The most that come to the device for one update."""
    handles: frozenset[str] = frozenset()
    """The nodes of their handles."""
    stay: Mapping[str, int] = field(default_factory=dict)
    """Variables that stay on the device, by reason."""
    nodes: tuple[str, ...] = ()
    """The names of the added nodes."""
    outputs: Mapping[str, Sequence[Output]] = field(default_factory=dict)
    """Type and shape of what each added node makes."""


@dataclass
class _Variable:
    handle: int
    value: Output
    nbytes: int
    early: list[int]
    """Reads for the forward and the backward pass."""
    late: list[int]
    """Reads for an update, or behind one."""
    updates: list[int]
    in_place: list[int] = field(default_factory=list)
    """Ops that read the variable where it lies, before its update."""
    gates: list[int] = field(default_factory=list)

    @property
    def is_state(self) -> bool:
        return not self.early


def stream_variables(
    graph_def: Any,
    table: NodeTable,
    outputs: Sequence[Sequence[Output]],
    transport: Transport,
    values: HostValues,
    known: Mapping[str, Output],
    holds: Callable[[str], bool],
    wants: Callable[[bool], bool],
    min_bytes: int,
    fetches: Collection[str] = (),
    pace: Pace = PACES[0],
) -> Streamed:
    """Edit ``graph_def`` so that variables stream; its nodes are sorted anew.

    Args:
        graph_def: The graph.
        table: The same as a table.
        outputs: Type and shape of the outputs of each node.
        transport: How values come and go.
        values: How variables have them in host memory.
        known: Type and shape of the variables, by the names of their handles' nodes.
        holds: Whether a node with this device name runs on the device that is planned.
        wants: Whether variables stream that only updates read (True), and those that others read (False).
        min_bytes: Smaller variables stay.
        fetches: Names of the nodes that are fetched.
        pace: How far copies go ahead of the uses.
    """
    found = _Finder(table, outputs, known, holds, min_bytes, {one.partition(":")[0] for one in fetches})
    chosen = [one for one in found.variables() if wants(one.is_state)]
    stay = dict(found.stay.most_common())
    if not chosen:
        return Streamed(stay=stay)
    edit = _Edit(graph_def, table, transport, values, pace)
    for variable in chosen:
        edit.stream(variable)
    edit.tie(found.anchor(chosen))
    edit.sort(found.phase)
    edit.pace()
    weights = sum(not one.is_state for one in chosen)
    return Streamed(
        len(chosen) - weights,
        weights,
        sum(one.nbytes for one in chosen),
        edit.bytes_in,
        edit.bytes_out,
        edit.copies_out,
        edit.group_bytes,
        frozenset(table.names[one.handle] for one in chosen),
        stay,
        tuple(edit.added),
        edit.outputs,
    )


def find_variables(
    table: NodeTable,
    outputs: Sequence[Sequence[Output]],
    known: Mapping[str, Output],
    holds: Callable[[str], bool],
    fetches: Collection[str] = (),
) -> Iterator[tuple[int, bool]]:
    """Yield the bytes of each variable of a graph, and whether only updates read it."""
    names = {one.partition(":")[0] for one in fetches}
    found = _Finder(table, outputs, known, holds, 1, names)
    seen = set()
    for one in found.variables():
        seen.add(table.names[one.handle])
        yield one.nbytes, one.is_state
    for name, value in known.items():
        if name not in seen:
            yield size_of(value) or 0, False


class _Finder:
    """Finds the variables of a graph that can stream, and why the others cannot."""

    def __init__(
        self,
        table: NodeTable,
        outputs: Sequence[Sequence[Output]],
        known: Mapping[str, Output],
        holds: Callable[[str], bool],
        min_bytes: int,
        fetches: Collection[str],
    ) -> None:
        self._table, self._outputs, self._known = table, outputs, known
        self._holds, self._min_bytes, self._fetches = holds, min_bytes, fetches
        self._place = {node: place for place, node in enumerate(table.order)}
        self.stay: Counter[str] = Counter()
        self.updates = frozenset(node for node, op_type in enumerate(table.types) if is_update(op_type))
        self.phase = self._update_phase()
        """The nodes that lead to nothing but updates, and these."""

    def _update_phase(self) -> frozenset[int]:
        table = self._table
        phase = set(self.updates)
        for node in reversed(table.order):
            readers = [reader for reader, _ in table.readers[node]]
            fixed = table.types[node] in HANDLES or table.names[node] in self._fetches
            if readers and not fixed and phase.issuperset(readers):
                if not is_backward(table.names[node], table.types[node]):
                    phase.add(node)
        return frozenset(phase)

    def variables(self) -> Iterator[_Variable]:
        """Yield the variables that can stream; count the others."""
        for node, op_type in enumerate(self._table.types):
            if op_type in HANDLES and self._table.readers[node]:
                found = self._variable(node)
                if isinstance(found, str):
                    self.stay[found] += 1
                elif found is not None:
                    yield found

    def _variable(self, handle: int) -> _Variable | str | None:
        table = self._table
        users = sorted({user for user, _ in table.readers[handle]}, key=self._place.__getitem__)
        reads = [user for user in users if table.types[user] == READ]
        updates = [user for user in users if user in self.updates]
        value = self._known.get(table.names[handle]) or next((self._outputs[read][0] for read in reads), None)
        if value is None or not (reads or updates):
            return None  # no variable, an iterator for example
        others = {table.types[user] for user in users if user not in reads and user not in updates}
        if others - READ_IN_PLACE or any(table.frame[user] != ROOT for user in users):
            return IN_LOOP
        if not all(self._holds(table.nodes[user].device) for user in users):
            return None
        nbytes = size_of(value)
        if nbytes is None:
            return OPEN
        if nbytes < max(1, self._min_bytes):
            return SMALL
        late = [read for read in reads if read in self.phase or self._is_behind(read, updates)]
        early = [read for read in reads if read not in late]
        made = _Variable(handle, value, nbytes, early, late, updates)
        made.in_place = [one for one in users if table.types[one] in READ_IN_PLACE]
        made.in_place = [one for one in made.in_place if not self._is_behind(one, updates)]
        readers = [reader for read in early for reader, _ in table.readers[read]]
        if any(table.types[one] == "AddN" and len(table.inputs[one]) > 2 for one in readers):
            return SUMMED
        if any(table.frame[one] != ROOT or table.types[one] in RESULTS for one in readers):
            return IN_LOOP
        if updates:
            made.gates = self._gates(made)
            if not made.gates:
                return UNGATED
            if self.anchor([made]) is None:
                return UNANCHORED
        return made

    def _is_behind(self, read: int, updates: Collection[int]) -> bool:
        """Tell whether a read waits for an update of its variable."""
        if not updates:
            return False
        table, first = self._table, min(self._place[update] for update in updates)
        open_nodes, seen = [*table.controls[read]], set(table.controls[read])
        while open_nodes:
            node = open_nodes.pop()
            if node in updates:
                return True
            for before in (*(source.node for source in table.inputs[node]), *table.controls[node]):
                if before not in seen and self._place[before] >= first:
                    seen.add(before)
                    open_nodes.append(before)
        return False

    def _gates(self, variable: _Variable) -> list[int]:
        """Return the nodes whose results an update waits for: its gradient.

        What waits for another variable's update, to read that one then, waits for its gradient.
        """
        table = self._table
        open_nodes, seen = [*variable.updates], set(variable.updates)
        large: list[int] = []
        small: list[int] = []
        while open_nodes:
            node = open_nodes.pop()
            for source in table.inputs[node]:
                if source.node in seen:
                    continue
                seen.add(source.node)
                if source.node in self.phase:
                    open_nodes.append(source.node)
                elif table.types[source.node] not in OUTSIDE_TYPES and table.frame[source.node] == ROOT:
                    nbytes = size_of(self._outputs[source.node][source.index]) or 0
                    (large if nbytes >= self._min_bytes else small).append(source.node)
            if table.types[node] == READ:
                waits = {one for one in table.controls[node] if one in self.updates} - seen
                seen |= waits
                open_nodes += waits
        return sorted(large or small, key=self._place.__getitem__)

    def anchor(self, variables: Iterable[_Variable]) -> int | None:
        """Return a node that is run in any case and waits for what the step ends with."""
        table = self._table
        for node, op_type in enumerate(table.types):
            if op_type in RESULTS:
                return node
        behind = {update for one in variables for update in one.updates}
        return next(
            (
                node
                for node in reversed(table.order)
                if table.names[node] in self._fetches and not behind.isdisjoint(table.controls[node])
            ),
            None,
        )


class _Edit:
    """Adds the nodes that let variables stream, and sorts the graph's nodes."""

    def __init__(
        self, graph_def: Any, table: NodeTable, transport: Transport, values: HostValues, pace: Pace
    ) -> None:
        self._graph_def, self._table = graph_def, table
        self._transport, self._values, self._pace = transport, values, pace
        self._nodes = {node.name: node for node in table.nodes}
        self.added: dict[str, Any] = {}
        self.outputs: dict[str, Sequence[Output]] = {}
        self.bytes_in = self.bytes_out = self.copies_out = 0
        self._fetches: list[tuple[str, list[str], int]] = []
        """Each copy for a pass, the nodes that read it, and its bytes."""
        self._sorted: dict[str, int] = {}
        """The place of each node once they are sorted."""
        self.group_bytes = 0
        """The most bytes of variables that come to the device for one update."""
        self._stays: dict[tuple[int, ...], _Stay] = {}
        """By the nodes that an update waits for the variables that are updated then."""

    def stream(self, variable: _Variable) -> None:
        """Add the nodes for one variable."""
        table = self._table
        handle = table.names[variable.handle]
        user = next(iter((*variable.early, *variable.late, *variable.updates)))
        device, base = table.nodes[user].device, f"{handle}/{MARK}"
        value = self._add(f"{base}/value", VALUE)
        self._values.write_read(self.added[value], handle, variable.value.dtype, device)
        self.outputs[value] = [variable.value]
        readers = [one for read in variable.early for one in table.readers[read]]
        passes: dict[bool, list[tuple[int, int]]] = {}
        for reader, slot in readers:
            in_backward = is_backward(table.names[reader], table.types[reader])
            passes.setdefault(in_backward, []).append((reader, slot))
        for number, in_backward in enumerate(sorted(passes)):
            fetched = self._copy_in(f"{base}/fetch_{number}", value, variable, device)
            for reader, slot in passes[in_backward]:
                table.nodes[reader].input[slot] = fetched
            names = sorted({table.names[one] for one, _ in passes[in_backward]})
            self._fetches.append((fetched, names, variable.nbytes))
        if variable.updates:
            self._stay(variable, handle, base, value, device)

    def _stay(self, variable: _Variable, handle: str, base: str, value: str, device: str) -> None:
        table = self._table
        back = self._copy_in(f"{base}/back", value, variable, device)
        self._wait(back, (table.names[gate] for gate in variable.gates))
        dtype = variable.value.dtype
        enter = self._add(f"{base}/enter", STREAM_ENTER)
        write_variable_op(self.added[enter], ASSIGN, [handle, back], dtype, device)
        self._wait(enter, (table.names[one] for one in variable.in_place))
        users = [table.names[one] for one in (*variable.updates, *variable.late)]
        for user in users:
            self._wait(user, [enter])
        last = self._add(f"{base}/last", STREAM_LAST)
        write_variable_op(self.added[last], READ, [handle], dtype, device)
        self._wait(last, users)
        out = self._add(f"{base}/out", STREAM_OUT)
        self._transport.write_swap_out(self.added[out], last, dtype, device)
        self.outputs |= {last: [variable.value], out: [variable.value]}
        self.bytes_out += variable.nbytes
        self.copies_out += 1
        leave = self._add(f"{base}/leave", STREAM_LEAVE)
        self._values.write_assign(self.added[leave], handle, out, dtype, device)
        gates = tuple(variable.gates)
        stay = self._stays.setdefault(gates, _Stay([table.names[gate] for gate in gates]))
        stay.backs.append(back)
        stay.enters.append(enter)
        stay.users += users
        stay.leaves.append(leave)
        stay.nbytes += variable.nbytes

    def _copy_in(self, name: str, value: str, variable: _Variable, device: str) -> str:
        self._add(name, STREAM_IN)
        self._transport.write_swap_in(self.added[name], value, variable.value.dtype, device)
        self.outputs[name] = [variable.value]
        self.bytes_in += variable.nbytes
        return name

    def _add(self, name: str, purpose: str) -> str:
        node = self._graph_def.node.add(name=name)
        node.attr[MARK_ATTR].s = purpose.encode()
        self.added[name] = self._nodes[name] = node
        self.outputs[name] = []
        return name

    def _wait(self, name: str, waits: Iterable[str]) -> None:
        node = self._nodes[name]
        known = set(node.input)
        node.input.extend(f"^{wait}" for wait in dict.fromkeys(waits) if f"^{wait}" not in known)

    def tie(self, anchor: int | None) -> None:
        """Have a node that is run in any case wait for the variables to leave."""
        leaves = [leave for stay in self._stays.values() for leave in stay.leaves]
        if anchor is not None and leaves:
            self._wait(self._table.names[anchor], leaves)

    # --- order -----------------------------------------------------------------------------------------

    def sort(self, phase: Collection[int]) -> None:
        """Sort the nodes: what an update needs right behind its gradient, a copy right before its reader."""
        first = len(self._table.nodes)
        edited = NodeTable.of(self._graph_def)
        place = {node: index for index, node in enumerate(edited.order)}
        number, inputs, controls, types = edited.number, edited.inputs, edited.controls, edited.types
        keys: list[float] = [float(place[node]) for node in range(len(edited.nodes))]
        before: list[set[int]] = []
        for node in range(len(edited.nodes)):
            is_merge = types[node] in MERGES
            needed = {one.node for one in inputs[node] if not (is_merge and types[one.node] in TURNS)}
            before.append(needed | {*controls[node]})
        follows = {*phase, *range(first, len(edited.nodes))}
        stays = self._stays_by(lambda gate: keys[number[gate]])
        least: dict[int, float] = {}
        for stay, later in zip(stays, stays[1:] if self._pace.runs_on else (), strict=False):
            behind = max(keys[number[gate]] for gate in later.gates)
            least.update((number[enter], behind) for enter in stay.enters)
        for node in edited.order:
            if node in follows:
                found = max((keys[one] for one in before[node]), default=keys[node])
                keys[node] = max(found, least.get(node, found))
        for fetched, readers, _ in self._fetches:
            keys[number[fetched]] = min(keys[number[reader]] for reader in readers) - 0.5
        waiting = [len(needed) for needed in before]
        after: list[list[int]] = [[] for _ in before]
        for node, needed in enumerate(before):
            for one in needed:
                after[one].append(node)
        ready = [(keys[node], node) for node, count in enumerate(waiting) if not count]
        heapify(ready)
        self._sorted = {}
        while ready:
            _, node = heappop(ready)
            self._sorted[edited.names[node]] = len(self._sorted)
            for following in after[node]:
                waiting[following] -= 1
                if not waiting[following]:
                    heappush(ready, (keys[following], following))
        nodes = sorted(self._graph_def.node, key=lambda node: self._sorted[node.name])
        copies = type(self._graph_def)()
        copies.node.extend(nodes)
        del self._graph_def.node[:]
        self._graph_def.node.extend(copies.node)
        self._nodes = {node.name: node for node in self._graph_def.node}

    def pace(self) -> None:
        """Let copies wait for uses of earlier ones, so that few are on the device at once."""
        place = self._sorted
        fetches = [(min(names, key=place.__getitem__), one, size) for one, names, size in self._fetches]
        fetches.sort(key=lambda fetch: place[fetch[0]])
        groups = neighbours(fetches, [nbytes for _, _, nbytes in fetches])
        for earlier, later in zip(groups, groups[self._pace.passes :], strict=False):
            for _, fetched, _ in later:
                readers = [reader for reader, _, _ in earlier if place[reader] < place[fetched]]
                self._wait(fetched, readers[-1:])
        stays = self._stays_by(place.__getitem__)
        self.group_bytes = max((stay.nbytes for stay in stays), default=0)
        for before, stay in zip(stays, stays[1:] if self._pace.runs_on else (), strict=False):
            begin = min(place[enter] for enter in before.enters)
            for enter in before.enters:
                self._wait(enter, (gate for gate in stay.gates if place[gate] < begin))
        for number, stay in enumerate(stays):
            begin = min(place[name] for name in (*stay.backs, *stay.enters))
            left = [one for one in stays[:number] if max(place[name] for name in one.leaves) < begin]
            for back in stay.backs:
                self._wait(back, (leave for one in left[-self._pace.updates :][:1] for leave in one.leaves))

    def _stays_by(self, place: Callable[[str], float]) -> list["_Stay"]:
        """Return the stays in the order in which their gates come, neighbours put together."""
        stays = sorted(self._stays.values(), key=lambda stay: max(map(place, stay.gates)))
        return [_Stay.of(group) for group in neighbours(stays, [stay.nbytes for stay in stays])]


@dataclass
class _Stay:
    """The variables that come to the device for one update, or for several at once."""

    gates: list[str]
    backs: list[str] = field(default_factory=list)
    enters: list[str] = field(default_factory=list)
    users: list[str] = field(default_factory=list)
    leaves: list[str] = field(default_factory=list)
    nbytes: int = 0

    @classmethod
    def of(cls, stays: Sequence["_Stay"]) -> "_Stay":
        """Return several as one."""
        parts = ("gates", "backs", "enters", "users", "leaves")
        gates, backs, enters, users, leaves = (
            [name for stay in stays for name in getattr(stay, part)] for part in parts
        )
        return cls(gates, backs, enters, users, leaves, sum(stay.nbytes for stay in stays))


_Item = TypeVar("_Item")


def neighbours(items: Sequence[_Item], sizes: Sequence[int]) -> list[list[_Item]]:
    """Put small items together with their neighbours, so that each group but the last is worth a copy.

    A bias that counted as much as its kernel would let nothing be copied ahead of the next kernel's use. A
    group ends once it has half of the bytes of the item in which the average byte lies.
    """
    typical = sum(size * size for size in sizes) / max(1, sum(sizes))
    groups: list[list[_Item]] = []
    held = 0.0
    for item, size in zip(items, sizes, strict=True):
        if not groups or held >= typical / 2:
            groups.append([])
            held = 0
        groups[-1].append(item)
        held += size
    return groups
