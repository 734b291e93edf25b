"""The passes that read a frame into plain values, and apply the filters of the configuration."""

from dataclasses import replace

from lms.ir.name_filters import select
from lms.passes.work import Work
from lms.reader.step_reader import read_step


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
