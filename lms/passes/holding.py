"""The pass that has ops wait where that saves memory."""

from collections.abc import Collection, Sequence
from dataclasses import replace

from lms.optimizer.grappler_item import Output
from lms.passes.parsing import kept_nodes
from lms.passes.work import Work
from lms.reader.node_table import ROOT, NodeTable
from lms.reader.step_reader import read_step
from lms.reader.survey import Place
from lms.rewriter.branches import hold_back
from lms.rewriter.late_updates import delay_updates
from lms.rewriter.shape_readers import late_shapes, tell_at_once
from lms.rewriter.sum_order import has_long_sums, named_beginnings


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
