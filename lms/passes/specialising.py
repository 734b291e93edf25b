"""Take the conditions out of a session's graph that its call decides, before anything is planned."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lms.device.device import Device
from lms.passes.parsing import Parsing, fed_nodes, kept_nodes
from lms.passes.shaping import Shaping
from lms.passes.work import Pass, Specialised, Task, Work, place_of, run_passes
from lms.reader.node_table import NodeTable
from lms.reader.step_reader import read_step
from lms.rewriter.sum_order import Beginning, has_long_sums, named_beginnings
from lms.rewriter.validation import require_same_pairs
from lms.rewriter.writer import RewriteError
from lms.specialiser.decided_branches import may_decide, with_branches_taken
from lms.specialiser.late_sources import delay_sources
from lms.specialiser.needless_nodes import without_needless

logger = logging.getLogger("lms")


class Specialising:
    """Takes out the conditions that a call decides, where the graph does not fit with them for certain.

    It comes before the passes over each device and frame, for it makes another graph.

    Args:
        survey: The passes that tell whether a step fits as it is.
        environ: The process's variables.
        keeps: Is told whether a graph keeps its conditions because it fits with them.
    """

    def __init__(
        self, survey: Sequence[Pass], environ: Mapping[str, str], keeps: Callable[[bool], None]
    ) -> None:
        self._survey, self._environ, self._keeps = survey, environ, keeps

    def requires(self, task: Task, graph_def: Any) -> bool:
        """Tell whether the call decides any condition of the graph."""
        known = None if task.is_body else task.predicates
        return known is not None and may_decide(graph_def, known)

    def apply(self, task: Task, graph_def: Any, devices: Sequence[Device]) -> tuple[Task, Any]:
        """Return the task with what was made of its graph, and that graph; both as they are if it fits."""
        if self._fits_as_it_is(task, graph_def, devices):
            self._keeps(True)
            return task, graph_def
        assert task.predicates is not None  # noqa: S101 - required
        kept, fed = kept_nodes(task, graph_def), fed_nodes(task, graph_def)
        fetches = task.request.item.fetches()
        table = NodeTable.of(graph_def, fed)
        taken = with_branches_taken(graph_def, table, task.predicates, kept, fetches)
        if taken is None:
            return task, graph_def
        made = without_needless(taken.graph_def, kept)
        outputs = {**taken.outputs, **delay_sources(made, kept, task.config.min_tensor_bytes)}
        made = without_needless(made, kept)
        try:
            sums = self._sums(task, graph_def, NodeTable.of(made, fed), devices)
        except RewriteError as error:
            logger.info("%s keeps its conditions: %s", task.name, error)
            return task, graph_def
        self._keeps(False)
        request = replace(task.request, graph=made.SerializeToString())
        return replace(task, request=request, specialised=Specialised(outputs, taken.like, sums)), made

    def _fits_as_it_is(self, task: Task, graph_def: Any, devices: Sequence[Device]) -> bool:
        """Tell whether a step needs no plan for certain, also with its conditions."""
        begun = (
            Work(task, device, place_of(device, self._environ), graph_def=graph_def) for device in devices
        )
        return all(run_passes([Parsing(), *self._survey], work).fits for work in begun)

    def _sums(
        self, task: Task, graph_def: Any, specialised: NodeTable, devices: Sequence[Device]
    ) -> dict[str, Beginning]:
        """Return by name what sums begin with in a graph that is specialised.

        Raises:
            RewriteError: If TensorFlow would merge other nodes in the specialised graph.
        """
        sums: dict[str, Beginning] = {}
        for device in devices:
            place = place_of(device, self._environ)
            work = run_passes([Parsing()], Work(task, device, place, graph_def=graph_def))
            table = work.table
            assert table is not None  # noqa: S101 - it is parsed
            require_same_pairs(place.kernels, table, specialised)
            if has_long_sums(table):
                work = run_passes([Shaping()], work)
                sums |= named_beginnings(read_step(table, work.outputs, place, fetches=work.fetches))
        return sums
