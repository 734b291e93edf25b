"""Write what was decided for a step into the GraphDef that it was read from."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lms.ir.assignments import in_place
from lms.planner.host_operands import Decision
from lms.reader.step_reader import Step
from lms.rewriter.repeats import write_repeats
from lms.rewriter.segments import in_segments, mark_segments
from lms.rewriter.shape_readers import leaving, part_shapes
from lms.rewriter.sum_order import Beginning, beginnings, disturbed
from lms.rewriter.writer import Edits, relocated, write_plan
from lms.transports.base import Transport


def write_decision(
    graph_def: Any,
    step: Step,
    decided: Decision,
    transport: Transport,
    sums_before: Mapping[str, Beginning] | None = None,
) -> Edits:
    """Edit ``graph_def``: first the ops that are repeated, then the plan for the graph with these.

    Segments are marked at last: to the plan each is one op.

    Args:
        graph_def: The graph that ``step`` was read from.
        step: Its values, and the nodes behind them.
        decided: A decision for ``step.graph``, or for one that differs from it in what may be swapped.
        transport: How tensors leave and come back.
        sums_before: What sums begin with in the step that the user runs, by the names of their nodes;
            ``None``: it is ``step``.

    Raises:
        RewriteError: If the decision does not fit the graph, which is of no use then.
    """
    known, segmentation = len(graph_def.node), decided.segmentation
    sums, made = _sums(step, sums_before), decided.recomputation
    if made is not None:
        sums = {made.places[op]: first for op, first in {**disturbed(step.graph, made), **sums}.items()}
        step = write_repeats(graph_def, step, made)
    fixed = {step.members[op][0]: first for op, first in sums.items()}
    if segmentation is not None:
        step = in_segments(step, segmentation)
        compiled = {node for op in segmentation.segments for node in step.members[op]}
        fixed = {node: first for node, first in fixed.items() if node not in compiled}
    plan, moved = decided.plan, decided.relocation
    if moved is not None:
        step = relocated(step, moved)
    parted = part_shapes(graph_def, step, plan, leaving(step, plan, _dropped(decided)))
    written = () if plan.is_empty else sorted(in_place(decided.case.buffers, plan.order))
    edits = write_plan(graph_def, step, plan, transport, moved, fixed, written)
    if segmentation is not None:
        names = step.table.names
        mark_segments(graph_def, [[names[node] for node in step.members[op]] for op in segmentation.segments])
    added = (node.name for node in list(graph_def.node)[known:])
    return replace(edits, nodes=tuple(dict.fromkeys([*added, *parted, *edits.nodes])))


def _sums(step: Step, before: Mapping[str, Beginning] | None) -> dict[int, Beginning]:
    """Return what sums begin with without an edit, by op."""
    if before is None:
        return beginnings(step)
    names = [step.table.names[members[0]] for members in step.members]
    return {op: before[name] for op, name in enumerate(names) if name in before}


def _dropped(decided: Decision) -> set[int]:
    """Return the buffers of the planned graph that are made a second time."""
    made = decided.recomputation
    if made is None:
        return set()
    copies = {tensor for op in made.repeated for tensor in made.graph.ops[op].outputs}
    dropped = {now for now, old in enumerate(made.tensors) if old in made.dropped and now not in copies}
    for later in (decided.segmentation, decided.relocation):
        if later is not None:
            dropped = {now for now, old in enumerate(later.tensors) if old in dropped}
    return dropped
