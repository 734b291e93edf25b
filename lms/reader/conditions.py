"""Find the conditions under which the nodes of a frame run: those of ``if``s, and those of loops.

An executor leaves out what waits for a node that is left out. So from outside its branch others wait for a
node behind it that runs in any case (:mod:`lms.rewriter.branches`).
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from lms.ir.op_traits import MERGES, is_backward
from lms.reader.node_table import EXITS, SWITCHES, TURNS, NodeTable, Source

Branches = frozenset[tuple[Source, int]]
ALWAYS: Branches = frozenset()
"""The conditions of a node that no condition leaves out: none."""

TURNING = frozenset({"Enter", "LoopCond", "NextIteration", "RefEnter", "RefNextIteration"})
"""Nodes that turn a loop; they are left where they are."""


@dataclass(frozen=True)
class Conditions:
    """The conditions of each node of a frame, and those of its step."""

    of_node: Sequence[Branches]
    """(predicate, branch) of each."""
    step: Branches
    """The conditions under which most of the backward pass runs."""
    types: Sequence[str]

    def runs_with_step(self, node: int) -> bool:
        """Tell whether a node runs whenever the step does, and only then."""
        return self._of(node) == self.step

    def runs_with(self, node: int, other: int) -> bool:
        """Tell whether a node runs whenever another one does."""
        return self._of(node) <= self._of(other)

    def predicate(self, node: int) -> Source | None:
        """Return the predicate that may leave a node out of a step that runs.

        It is made whenever the step runs. ``None``: there is none, or the node may run without the step.
        """
        mine = self._of(node)
        made = (source for source, _ in mine - self.step if self.runs_with_step(source.node))
        return min(made, default=None) if mine > self.step else None

    def _of(self, node: int) -> Branches:
        """Return the conditions of a node; one that was added later is the step's."""
        return self.of_node[node] if node < len(self.of_node) else self.step

    def may_be_ordered(self, node: int) -> bool:
        """Tell whether a node may get control edges, and others can wait for it in each step."""
        fixed = self.types[node] in TURNING or self.types[node] in MERGES or self.types[node] in SWITCHES
        return not fixed and (self.runs_with_step(node) or self.predicate(node) is not None)


def find_conditions(table: NodeTable, frame: int) -> Conditions:
    """Find the conditions of the nodes of ``frame``; a node of an inner loop has those of the loop."""
    if SWITCHES.isdisjoint(table.types):
        return Conditions([ALWAYS] * len(table.types), ALWAYS, table.types)
    of_node: list[Branches] = [ALWAYS] * len(table.types)
    votes: Counter[Branches] = Counter()
    for node in table.order:
        if not table.is_within(table.frame[node], frame):
            continue
        of_node[node] = _conditions(table, frame, node, of_node)
        if table.frame[node] == frame and is_backward(table.names[node], table.types[node]):
            votes[of_node[node]] += 1
    step = max(votes, key=lambda one: (votes[one], -len(one)), default=ALWAYS)
    return Conditions(of_node, step, table.types)


def _conditions(table: NodeTable, frame: int, node: int, of_node: Sequence[Branches]) -> Branches:
    read = table.inputs[node]
    if table.types[node] in MERGES:
        before = [_after(table, frame, s, of_node) for s in read if table.types[s.node] not in TURNS]
        return frozenset.intersection(*before) if before else ALWAYS
    found = ALWAYS
    is_exit = table.types[node] in EXITS
    for source in read:
        mine = of_node[source.node] if is_exit else _after(table, frame, source, of_node)
        found = mine if mine >= found else found if found >= mine else found | mine
    for control in table.controls[node]:
        mine = of_node[control]
        found = mine if mine >= found else found if found >= mine else found | mine
    return found


def _after(table: NodeTable, frame: int, source: Source, of_node: Sequence[Branches]) -> Branches:
    """Return the conditions of a reader of ``source``.

    Behind a switch of the frame itself the branch is one more condition.
    """
    mine = of_node[source.node]
    if table.types[source.node] in SWITCHES and table.frame[source.node] == frame:
        return mine | {(table.inputs[source.node][1], source.index)}
    return mine
