"""The pass that stacks the lists of loops where that lets a plan swap them."""

from collections.abc import Collection, Sequence
from dataclasses import replace

from tensorflow.core.framework import graph_pb2

from lms.passes.parsing import fed_nodes
from lms.passes.work import Pass, Work
from lms.planner.hybrid import score
from lms.reader.node_table import ROOT, NodeTable
from lms.rewriter.stacking import Stackable, find_stackable, find_zeros, stack_lists
from lms.rewriter.validation import require_same_pairs

POLICIES = frozenset({"all", "auto", "budget"})


class Stacking:
    """Plans a step again with the lists of its loops as tensors, and keeps those that are swapped.

    Args:
        plan: The passes that read a step and plan it.
    """

    name = "lists"

    def __init__(self, plan: Sequence[Pass]) -> None:
        self._plan = plan

    def requires(self, work: Work) -> bool:
        """Tell whether a step with loops needs more memory than it may use, or is to use the least."""
        if work.decision is None or work.table is None or len(work.table.frames) == 1:
            return False
        config, made = work.task.config, work.decision.plan
        if config.policy not in POLICIES or config.recompute == "only" or work.task.compiled:
            return False
        return config.policy == "all" or not (made.is_empty and made.feasible)

    def apply(self, work: Work) -> Work:
        """Return the work with lists stacked where that is the better plan."""
        assert work.table is not None  # noqa: S101 - required
        least, frame = work.task.config.min_tensor_bytes, work.frame or ROOT
        found = find_stackable(work.table, work.outputs, frame, work.place, least)
        stacked = self._planned(work, found) if found else work
        if swapped := _swapped(stacked):
            if len(swapped) < len(found):
                stacked = self._planned(work, swapped)
            return min((work, stacked), key=_score)
        return work

    def _planned(self, work: Work, lists: Collection[Stackable]) -> Work:
        """Plan a copy of the graph in which these lists are stacked."""
        assert work.table is not None  # noqa: S101 - required
        graph_def = graph_pb2.GraphDef()
        graph_def.CopyFrom(work.graph_def)
        fed = fed_nodes(work.task, graph_def)
        zeros = find_zeros(work.table, work.outputs, work.frame or ROOT, work.place)
        made = stack_lists(graph_def, NodeTable.of(graph_def, fed), lists, zeros)
        table = NodeTable.of(graph_def, fed)
        require_same_pairs(work.place.kernels, work.table, table)
        known = {**dict(zip(work.table.names, work.outputs, strict=True)), **made.outputs}
        outputs = [known[name] for name in table.names]
        frame = table.frame[table.number[_first_of(work)]]
        work = replace(work, graph_def=graph_def, table=table, outputs=outputs, frame=frame, stacked=made)
        for one in self._plan:
            work = one.apply(work)
        return work


def _first_of(work: Work) -> str:
    """Return the name of a node of the frame that is planned."""
    assert work.table is not None  # noqa: S101 - required
    return work.table.names[work.table.frame.index(work.frame or ROOT)]


def _swapped(work: Work) -> list[Stackable]:
    """Return the lists whose tensors the plan copies to the host."""
    assert work.table is not None and work.decision is not None  # noqa: S101 - planned
    graph, made = work.decision.graph, work.decision.plan
    moved = [*(one.tensor for one in made.swaps), *(one.tensor for one in made.sent)]
    names = {graph.ops[graph.tensors[tensor].op].name for tensor in moved}
    bare = {name: work.table.bare_name(work.table.number[name]) for name in work.stacked.tensors}
    return [one for name, one in work.stacked.tensors.items() if not names.isdisjoint((name, bare[name]))]


def _score(work: Work) -> tuple[float, ...]:
    """Return what the better of two plans has less of: time where both fit, but for the least memory."""
    assert work.decision is not None  # noqa: S101 - planned
    scored = score(work.decision, work.limit_bytes)
    return (work.decision.peak_bytes, *scored) if work.task.config.policy == "all" else scored
