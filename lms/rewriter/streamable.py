"""Find the variables of a graph that can stream, and say why the others cannot.

A variable streams whose value can lie in host memory between steps, and come to the device for its uses
(:mod:`lms.rewriter.streaming`).
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from lms.ir.op_traits import OUTSIDE_TYPES, is_backward, is_collective, is_update, may_end_step
from lms.optimizer.grappler_item import Output
from lms.reader.conditions import ALWAYS, find_conditions
from lms.reader.node_table import ROOT, SWITCHES, NodeTable, Source
from lms.reader.op_facts import size_of
from lms.reader.step_reader import RESULTS
from lms.variables.host_values import READ

HANDLES = frozenset({"_Arg", "VarHandleOp"})
GATHER = "ResourceGather"
READ_IN_PLACE = frozenset({GATHER, "VarIsInitializedOp"})
"""Ops that read a variable where it lies, in host memory too."""
SPARSE = ("ResourceGather", "ResourceScatter", "ResourceSparseApply", "ResourceStridedSliceAssign")
"""Beginnings of the types of ops that look at a part of a variable, or change one. From then on TensorFlow
makes a copy for whoever reads or assigns all of it."""

SMALL, OPEN = "smaller than min_tensor_bytes", "size is unknown"
IN_LOOP = "used in a loop or by a function that is called"
IN_BRANCH = "used by a step that is under a condition itself"
READ_IN_BRANCH = "read under a condition, and not only for an update"
SUMMED = "a term of a sum whose order hangs on free buffers"
UNGATED = "an update waits for nothing that the step computes"
UNANCHORED = "nothing waits for an update"
LOOKED_UP = "rows are read behind a variable that is updated later"
"""Reasons why a variable stays on the device."""


@dataclass
class Variable:
    """A variable that can stream, by the numbers of the nodes that have to do with it."""

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
    """The nodes whose results its update waits for."""
    is_gathered: bool = False
    """Whether the forward pass takes rows of it, as of an embedding."""

    @property
    def is_state(self) -> bool:
        """Whether only updates read it."""
        return not self.early and not self.is_gathered


class Finder:
    """Finds the variables of a graph that can stream, and why the others cannot."""

    def __init__(
        self,
        table: NodeTable,
        outputs: Sequence[Sequence[Output]],
        known: Mapping[str, Output],
        holds: Callable[[str], bool],
        min_bytes: int,
        fetches: Collection[str],
        *,
        anchored: bool = True,
    ) -> None:
        self._table, self._outputs, self._known = table, outputs, known
        self._anchored = anchored
        self._holds, self._min_bytes, self._fetches = holds, min_bytes, fetches
        self.conditions = find_conditions(table, ROOT)
        self._place = {node: place for place, node in enumerate(table.order)}
        self.stay: Counter[str] = Counter()
        self.updates = frozenset(node for node, op_type in enumerate(table.types) if is_update(op_type))
        self.phase = self._update_phase()
        """The updates, and what leads to nothing else; of that neither the backward pass nor communication,
        nor what these need."""

    def _update_phase(self) -> frozenset[int]:
        table = self._table
        phase = set(self.updates)
        for node in reversed(table.order):
            readers = [reader for reader, _ in table.readers[node]]
            op_type, name = table.types[node], table.names[node]
            fixed = op_type in HANDLES or name in self._fetches or is_collective(op_type)
            if readers and not fixed and phase.issuperset(readers) and not is_backward(name, op_type):
                phase.add(node)
        return frozenset(phase)

    def variables(self) -> Iterator[Variable]:
        """Yield the variables that can stream; count the others."""
        for handle in self._users:
            found = self._variable(handle)
            if isinstance(found, str):
                self.stay[found] += 1
            elif found is not None:
                yield found

    def _variable(self, handle: int) -> Variable | str | None:
        table = self._table
        users = sorted(self._users[handle], key=self._place.__getitem__)
        reads = [user for user in users if table.types[user] == READ]
        updates = [user for user in users if user in self.updates]
        value = self._known.get(table.names[handle]) or next((self._outputs[read][0] for read in reads), None)
        if value is None or not (reads or updates):
            return None  # no variable, an iterator for example
        if not all(self._holds(table.nodes[user].device) for user in users):
            return None
        others = {table.types[user] for user in users if user not in reads and user not in updates}
        if others - READ_IN_PLACE or any(table.frame[user] != ROOT for user in users):
            return IN_LOOP
        left_out = {user for user in users if not self._is_always_run(user)}
        if self.conditions.step != ALWAYS and left_out:
            return IN_BRANCH
        nbytes = size_of(value)
        if nbytes is None:
            return OPEN
        if nbytes < max(1, self._min_bytes):
            return SMALL
        late = [read for read in reads if read in self.phase or self._is_behind(read, handle)]
        late = late if updates else []  # what nothing updates is copied for each pass
        early = [read for read in reads if read not in late]
        made = Variable(handle, value, nbytes, early, late, updates)
        made.in_place = [one for one in users if table.types[one] in READ_IN_PLACE]
        made.in_place = [one for one in made.in_place if not self._is_behind(one, handle)]
        made.is_gathered = any(table.types[one] == GATHER for one in made.in_place)
        readers = [reader for read in early for reader, _ in table.readers[read]]
        if any(table.types[one] == "AddN" and len(table.inputs[one]) > 2 for one in readers):
            return SUMMED
        if any(table.frame[one] != ROOT or table.types[one] in RESULTS for one in readers):
            return IN_LOOP
        if not left_out.isdisjoint((*early, *made.in_place)):
            return READ_IN_BRANCH
        if updates:
            if not all(self._used_late[one] < self._bits[handle] for one in made.in_place):
                return LOOKED_UP
            made.gates = self._gates(made)
            if not made.gates:
                return UNGATED
            if self._anchored and self.anchor([made]) is None:
                return UNANCHORED
        return made

    def _is_always_run(self, node: int) -> bool:
        return self.conditions.of_node[node] == ALWAYS

    def _is_behind(self, read: int, handle: int) -> bool:
        """Tell whether a node waits for an update of a variable that it reads."""
        own = self._bits.get(handle, 0)
        return any(self._updated[one] & own for one in self._table.before[read])

    @cached_property
    def _users(self) -> Mapping[int, set[int]]:
        """The nodes that use each handle; without those that nobody reads."""
        table = self._table
        handles = (node for node, op_type in enumerate(table.types) if op_type in HANDLES)
        return {handle: table.users(handle) for handle in handles if table.readers[handle]}

    @cached_property
    def _bits(self) -> Mapping[int, int]:
        """A bit for each variable that may stream and is updated: the lower, the earlier that is."""
        first: dict[int, int] = {}
        for handle, users in self._users.items():
            value = self._known.get(self._table.names[handle])
            nbytes = None if value is None else size_of(value)
            if (updates := users & self.updates) and (nbytes is None or nbytes >= self._min_bytes):
                first[handle] = min(self._place[one] for one in updates)
        return {handle: 1 << place for place, handle in enumerate(sorted(first, key=first.__getitem__))}

    @cached_property
    def _updated(self) -> Sequence[int]:
        """The variables that each node updates, or waits for an update of, as bits."""
        return self._spread(self.updates)

    @cached_property
    def _used_late(self) -> Sequence[int]:
        """The variables that are updated, or read for that, by each node or before it, as bits."""
        types = self._table.types
        return self._spread({*self.updates, *(node for node in self.phase if types[node] == READ)})

    def _spread(self, users: Collection[int]) -> Sequence[int]:
        """Return for each node the bits of the variables that it and those before it use, of ``users``."""
        table, bits = self._table, [0] * len(self._table.nodes)
        for handle, found in self._users.items():
            for user in found.intersection(users):
                bits[user] |= self._bits.get(handle, 0)
        for node in table.order:
            for before in table.before[node]:
                bits[node] |= bits[before]
        return bits

    @cached_property
    def _shared(self) -> frozenset[int]:
        """Numbers that updates wait for, and that are made of gradients: a global norm, for example."""
        table, outputs = self._table, self._outputs
        behind_large, found = set[int](), set[int]()
        for node in table.order:
            if node in self.phase and node not in self.updates:
                sources = table.inputs[node]
                if any(one.node in behind_large or self._is_large_gate(one) for one in sources):
                    behind_large.add(node)
                    is_number = [one.dims for one in outputs[node]] == [()]
                    is_waited_for = self._is_always_run(node) or self.conditions.step == ALWAYS
                    is_plain = table.frame[node] == ROOT and self.conditions.may_be_ordered(node)
                    if is_number and is_waited_for and is_plain:
                        found.add(node)
        return frozenset(found)

    def _is_large_gate(self, source: Source) -> bool:
        table, node = self._table, source.node
        is_made = table.types[node] not in (*OUTSIDE_TYPES, *SWITCHES) and table.frame[node] == ROOT
        if not is_made or node in self.phase or not self._is_always_run(node):
            return False
        return (size_of(self._outputs[node][source.index]) or 0) >= self._min_bytes

    def _gates(self, variable: Variable) -> list[int]:
        """Return the nodes whose results an update waits for: its gradient.

        What waits for another variable's update, to read that one then, waits for its gradient. What waits
        for an update of the variable itself is passed over, as the average of all ranks' values, or the
        gradient of a second update in the step. What waits for a variable that is updated later is passed
        over, too: each of the two would wait for the other. An update under a condition waits for that as
        well; one for which all gradients are needed waits for what is made of them.
        """
        table, own = self._table, self._bits[variable.handle]
        open_nodes, seen = [*variable.updates], set(variable.updates)
        large: list[int] = []
        small: list[int] = []
        predicates: set[int] = set()
        while open_nodes:
            node = open_nodes.pop()
            for slot, source in enumerate(table.inputs[node]):
                if slot == 1 and table.types[node] in SWITCHES:
                    is_here = table.frame[source.node] == ROOT and self._is_always_run(source.node)
                    if is_here and self._used_late[source.node] < own:
                        predicates.add(source.node)
                    continue
                if source.node in seen:
                    continue
                seen.add(source.node)
                is_switch = table.types[source.node] in SWITCHES
                is_passed = source.node in self.phase or not self._is_always_run(source.node)
                is_first = self._used_late[source.node] < own
                if source.node in self._shared and is_first:
                    large.append(source.node)
                elif is_switch or is_passed or not is_first:
                    open_nodes.append(source.node)
                elif table.types[source.node] not in OUTSIDE_TYPES and table.frame[source.node] == ROOT:
                    nbytes = size_of(self._outputs[source.node][source.index]) or 0
                    (large if nbytes >= self._min_bytes else small).append(source.node)
            if table.types[node] == READ:
                waits = {one for one in table.controls[node] if one in self.updates} - seen
                seen |= waits
                open_nodes += waits
        gates = large or small
        return sorted({*gates, *predicates} if gates else (), key=self._place.__getitem__)

    def anchor(self, variables: Iterable[Variable]) -> int | None:
        """Return a node that is run in any case and can wait for what the step ends with.

        That is a result, or of what a session fetches a node that waits for the updates. In a function that
        returns nothing all effects are run: one that nothing waits for, as Keras's optimizers count steps.
        """
        table = self._table
        if not self._fetches or self._result is not None:
            return self._result if self._result is not None else self._small_end
        behind = {update for one in variables for update in one.updates}
        return next(
            (
                node
                for node in reversed(table.order)
                if table.names[node] in self._fetches and not behind.isdisjoint(table.controls[node])
            ),
            None,
        )

    @cached_property
    def _result(self) -> int | None:
        return next((node for node, op_type in enumerate(self._table.types) if op_type in RESULTS), None)

    @cached_property
    def _small_end(self) -> int | None:
        """A node that changes a variable too small to stream, and for which nothing waits.

        In a step that takes its batch itself it waits for that: one that does not is run when no batch is
        left, too.
        """
        table = self._table
        waited_for = {node for controls in table.controls for node in controls}
        behind_batch: set[int] = set()
        for node in table.order:
            before = (*(source.node for source in table.inputs[node]), *table.controls[node])
            if may_end_step(table.types[node]) or not behind_batch.isdisjoint(before):
                behind_batch.add(node)
        for node in reversed(table.order):
            is_end = not table.readers[node] and node not in waited_for and table.frame[node] == ROOT
            if is_end and node in self.updates and (not behind_batch or node in behind_batch):
                value = self._known.get(table.names[table.inputs[node][0].node])
                nbytes = None if value is None else size_of(value)
                if nbytes is not None and nbytes < self._min_bytes:
                    return node
        return None


def bytes_by_kind(variables: Iterable[Variable]) -> dict[bool, int]:
    """Return the bytes of variables that only updates read (True), and of those that others read (False)."""
    nbytes = {True: 0, False: 0}
    for one in variables:
        nbytes[one.is_state] += one.nbytes
    return nbytes


def find_variables(
    table: NodeTable,
    outputs: Sequence[Sequence[Output]],
    known: Mapping[str, Output],
    holds: Callable[[str], bool],
    fetches: Collection[str] = (),
) -> Iterator[tuple[int, bool]]:
    """Yield the bytes of each variable of a graph, and whether only updates read it."""
    names = {one.partition(":")[0] for one in fetches}
    found = Finder(table, outputs, known, holds, 1, names, anchored=False)
    seen = set()
    for one in found.variables():
        seen.add(table.names[one.handle])
        yield one.nbytes, one.is_state
    for name, value in known.items():
        if name not in seen:
            yield size_of(value) or 0, False
