"""Find the order in which TensorFlow adds the terms of a sum, so that an edited step adds them likewise.

``AddN`` looks for the first input whose buffer nothing else holds, writes into it, and begins with it in
place of the first (``AddNOp`` in aggregate_ops.cc). Who holds a buffer is another matter once tensors are
swapped and ops wait for each other. Of the first two terms either may begin: their sum is the same. So only
a sum that begins with a later one needs another order of its inputs, and all need their later inputs held.

Where it hangs on the taken branch, a loop's turn or another device whether a buffer is free, the sum keeps
its order. Then what something holds for certain without an edit is held, and no op that reads one of the
terms is repeated (:mod:`lms.planner.recomputation`).
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from lms.ir.graph import Graph, Op
from lms.ir.liveness import Buffers, positions
from lms.ir.op_traits import FEWEST_TERMS, SHAPE_READERS, SUM
from lms.planner.recomputation import Recomputation
from lms.reader.node_table import NodeTable
from lms.reader.step_reader import Step
from lms.schedule.op_order import executor_order


class Beginning(NamedTuple):
    """Says how a sum adds its terms in an edited step as it does without the edit."""

    slot: int
    """The input that is put first; 0: the order stays."""
    held: tuple[int, ...]
    """The inputs that are held until it has run, so that it begins with none of these."""


def has_long_sums(table: NodeTable) -> bool:
    """Tell whether any sum of a graph has so many terms that their order counts."""
    sums = (node for node, op_type in enumerate(table.types) if op_type == SUM)
    return any(len(table.inputs[node]) >= FEWEST_TERMS for node in sums)


def named_beginnings(step: Step) -> dict[str, Beginning]:
    """Return what :func:`beginnings` finds, by name: for a step that a pass is to change before the plan."""
    names = [step.table.names[members[0]] for members in step.members]
    return {names[op]: beginning for op, beginning in beginnings(step).items()}


def beginnings(step: Step) -> dict[int, Beginning]:
    """Say of each sum of three and more terms what has it begin as in the unedited step.

    Sums are left out of which one of the first two terms is free in any case: no edit changes that. Where
    another reader of a term is neither before nor behind the sum, whether it has run by then is left to
    chance; then the order of an executor with one thread counts. Where nobody can tell whether a term is
    free that the sum may begin with, what something holds for certain without an edit is held.
    """
    graph = step.graph
    sums = [op for op in graph.ops if op.type == SUM and len(op.inputs) >= FEWEST_TERMS]
    if not sums:
        return {}
    holders, found = _Holders(step, sums), {}
    for op in sums:
        terms = [holders.of_term(op, slot) for slot in range(len(op.inputs))]
        if not any(term.is_free for term in terms[:2]):
            found[op.id] = _beginning(op, terms)
    return found


class _Term(NamedTuple):
    """Tells whether anything else holds a term of a sum when that begins, without an edit."""

    is_free: bool
    """Tells that nothing does in any case."""
    is_held: bool
    """Tells that something does in any case."""
    is_late: bool
    """Tells that something does in the order of an executor with one thread."""
    is_unsure: bool
    """Tells that something may that no plan knows of, or that runs only in one branch."""


class _Holders:
    """Finds what holds the terms of a step's sums."""

    def __init__(self, step: Step, sums: Sequence[Op]) -> None:
        self._step, self._buffers = step, Buffers.of(step.graph)
        self._bits = {op.id: 1 << number for number, op in enumerate(sums)}
        self._before, self._behind = _reach(step.graph, self._bits)
        self._place = positions(executor_order(step.graph))
        self._told_late = _told_late(step)

    def of_term(self, op: Op, slot: int) -> _Term:
        """Describe a term. A reader counts for certain that runs whenever the sum does."""
        graph, kept, bit = self._step.graph, self._buffers.kept, self._bits[op.id]
        root = graph.roots[op.inputs[slot]]
        owner = graph.tensors[root]
        is_handed_on = graph.ops[owner.op].hands_on
        is_twice = sum(graph.roots[other] == root for other in op.inputs) > 1
        never_freed = is_twice or kept[root] or (owner.outside and not is_handed_on)
        readers = {*self._buffers.users[root], *self._told_late.get(root, ())} - {op.id}
        runs_with, nodes = self._step.conditions.runs_with, self._step.members
        certain = {one for one in readers if runs_with(nodes[one][0], nodes[op.id][0])}
        late = {one for one in readers if self._place[one] > self._place[op.id]}
        return _Term(
            is_free=not never_freed and not is_handed_on and all(self._before[one] & bit for one in readers),
            is_held=never_freed or any(self._behind[one] & bit for one in certain),
            is_late=not late.isdisjoint(certain),
            is_unsure=is_handed_on or not late <= certain,
        )


def _beginning(op: Op, terms: Sequence[_Term]) -> Beginning:
    """Say what has a sum begin as without an edit, of whose first two terms neither is free for certain."""
    open_slots = (slot for slot, term in enumerate(terms) if not (term.is_held or term.is_late))
    slot = next(open_slots, 0)
    if terms[slot].is_unsure and not terms[slot].is_held:
        return Beginning(0, tuple(slot for slot, term in enumerate(terms) if term.is_held))
    return _begins_with(slot if slot >= FEWEST_TERMS - 1 else 0, op)


def _begins_with(slot: int, op: Op) -> Beginning:
    """Have a sum begin with one of its terms, which need not be held then, like the second."""
    return Beginning(slot, tuple(one for one in range(len(op.inputs)) if one not in (slot, 1)))


def disturbed(graph: Graph, made: Recomputation) -> dict[int, Beginning]:
    """Have each sum begin with its first term whose terms get or lose readers because ops are repeated.

    Of one that :func:`beginnings` leaves out one of the first two terms was free in any case. That need not
    hold any more.
    """
    roots = graph.roots
    read = {roots[tensor] for op in made.repeated for tensor in graph.ops[made.ops[op]].inputs}
    touched = read | made.dropped
    return {
        op.id: _begins_with(0, op)
        for op in graph.ops
        if op.type == SUM
        and len(op.inputs) >= FEWEST_TERMS
        and not touched.isdisjoint(roots[tensor] for tensor in op.inputs)
    }


def _told_late(step: Step) -> dict[int, list[int]]:
    """Map buffers to ops that tell their shapes, and wait for others: so long each holds what it reads.

    Plans do not count an op as a reader of what it tells the shape of.
    """
    table, found = step.table, dict[int, list[int]]()
    op_of = {node: op for op, members in enumerate(step.members) for node in members}
    tensor_of = {source: tensor for tensor, source in enumerate(step.sources)}
    for node, op_type in enumerate(table.types):
        if op_type in SHAPE_READERS and (table.controls[node] or len(table.inputs[node]) > 1):
            for source in table.inputs[node]:
                if node in op_of and source in tensor_of:
                    found.setdefault(step.graph.roots[tensor_of[source]], []).append(op_of[node])
    return found


def _reach(graph: Graph, bits: Mapping[int, int]) -> tuple[list[int], list[int]]:
    """Return for each op the sums that it leads to, and those that lead to it, as bits."""
    before = [0] * len(graph.ops)
    behind = [0] * len(graph.ops)
    for op in range(len(graph.ops)):
        for earlier in graph.predecessors[op]:
            behind[op] |= behind[earlier] | bits.get(earlier, 0)
    for op in reversed(range(len(graph.ops))):
        for later in graph.successors[op]:
            before[op] |= before[later] | bits.get(later, 0)
    return before, behind
