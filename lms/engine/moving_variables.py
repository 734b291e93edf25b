"""Have variables of a step lie on the host where it does not fit with all of them on the device."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tensorflow.core.framework import graph_pb2

from lms.errors import LMSError
from lms.ir.graph import GraphError
from lms.passes.parsing import arguments_of
from lms.passes.streaming import variables_in_loop, variables_known
from lms.passes.work import Task, Work
from lms.reader.node_table import ROOT
from lms.rewriter.streamable import Finder, bytes_by_kind
from lms.swaps.swap_planner import usable_bytes

if TYPE_CHECKING:
    from lms.engine.engine import Engine

logger = logging.getLogger("lms")

MUCH_BEFORE = 1 / 3
"""The share of a device in use before a step, from which on it is told which variables stay there."""


class MovingVariables:
    """Plans steps again with more of their variables on the host.

    Args:
        engine: The engine that plans.
        planned: Plans a graph, which it changes, for all devices.
    """

    def __init__(self, engine: "Engine", planned: Callable[[Task, Any], list[Work]]) -> None:
        self._engine, self._planned = engine, planned

    def may_move(self, task: Task) -> bool:
        """Tell whether a step that does not fit may have more of its variables on the host.

        Plans for a device of another size move nothing, nor do those of IBM's classes.
        """
        is_real = not self._engine.resources.assumes_limit and task.limit_bytes is None
        is_ours = task.guest is None and self._engine.guest is None
        config = task.config
        swaps = config.policy != "threshold" and config.recompute != "only"
        return is_real and is_ours and swaps

    def move(
        self, task: Task, graph_def: Any, works: list[Work]
    ) -> tuple[Any, list[Work], tuple[float, float]]:
        """Plan a step again with more and more variables on the host, until it fits or none are left.

        Returns:
            The graph of the last plans, these, and the shares of the variables that stream in them.
        """
        host = self._engine.resources.host
        before = shares = host.shares
        plain = replace(task, compiled=False, may_be_whole=False)  # XLA finds no variables on the host
        while lacking := self._lacking_bytes(task, works):
            if not host.take_more(lacking, _streamable(works)):
                break
            moved_def = graph_pb2.GraphDef.FromString(task.request.graph)
            try:
                works, graph_def = self._planned(plain, moved_def), moved_def
            except (GraphError, LMSError) as error:  # the host is full, for example
                logger.info("%s keeps more of its variables on the device: %s", task.name, error)
                host.shares = shares
                graph_def = graph_pb2.GraphDef.FromString(task.request.graph)
                works = self._planned(task if shares == before else plain, graph_def)
                break
            shares = host.shares
        if lacking and any(map(_is_full_before, works)):
            self._engine.books.tell_of_kept(task.name, host.obstacle, map(_kept_variables, works))
        if shares != before:
            self._engine.steps.growth.renew_all()
            self._engine.books.tell_of_moved(task, works)
        return graph_def, works, shares

    def _lacking_bytes(self, task: Task, works: Sequence[Work]) -> int:
        """Return what devices lack for the plans of a step, or for variables that they have no room for."""
        if lacking := max(map(_lacking_bytes, works), default=0):
            return lacking
        streamed: set[int] = set()
        for work in works:
            if work.table is not None:
                streamed.update(arguments_of(work.table, work.streamed.handles))
        return self._engine.resources.host.lacking_bytes(task.inputs, streamed) if works else 0


def _lacking_bytes(work: Work) -> int:
    """Return what the best plan of a frame takes more than its device has; 0 where it fits."""
    decided, limit = work.decision, work.limit_bytes
    if decided is None:
        return 0
    made = decided.plan
    if limit is None or work.device.limit_bytes is None:
        return 0
    # Where variables move anyway, as many do as leave the margin free.
    usable = usable_bytes(work.task.config, limit) if work.streamed.nodes else limit
    lacking = decided.peak_bytes - (limit if usable is None else usable)
    if work.task.config.policy != "budget" and not made.feasible and made.budget_bytes is not None:
        lacking = max(lacking, made.peak_bytes - made.budget_bytes)
    return max(0, lacking + max(0, work.residents.nbytes - work.device.limit_bytes))


def _is_full_before(work: Work) -> bool:
    """Tell whether much of a device is in use before the step: by its variables, more likely than not."""
    limit = work.device.limit_bytes
    return limit is not None and work.residents.nbytes > MUCH_BEFORE * limit


def _kept_variables(work: Work) -> Mapping[str, int]:
    """Return how many variables of a frame cannot stream, by reason."""
    if work.streamed.stay or work.table is None or work.frame is None:
        return work.streamed.stay
    return variables_in_loop(work) if work.frame != ROOT else _found(work)[1]


def _found(work: Work) -> tuple[dict[bool, int], Mapping[str, int]]:
    """Return the bytes of the variables of a frame that can stream, and by reason how many cannot."""
    assert work.table is not None  # noqa: S101 - a graph that has been read
    known = variables_known(work.table, work.task.inputs)
    least, fetches = work.task.config.min_tensor_bytes, set(work.fetches)
    finder = Finder(work.table, work.outputs, known, work.place.holds, least, fetches)
    return bytes_by_kind(finder.variables()), finder.stay


def _streamable(works: Iterable[Work]) -> dict[bool, int]:
    """Return the bytes of a step's variables that can stream: an optimizer's state (True), and the others."""
    total = {True: 0, False: 0}
    for work in works:
        found: Mapping[bool, int] = work.streamed.streamable
        if not found and work.table is not None and work.frame == ROOT:
            found, _ = _found(work)
        for kind, nbytes in found.items():
            total[kind] += nbytes
    return total
