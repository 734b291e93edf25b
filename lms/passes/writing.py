"""The passes that write a plan into the graph, and check what was written."""

from collections.abc import Callable
from dataclasses import replace

from lms.device.memory_pool import Rooms
from lms.passes.work import Work
from lms.planner.room import rooms_of
from lms.rewriter.decision import write_decision
from lms.rewriter.validation import validate
from lms.transports.base import Transport


class Writing:
    """Writes the plan into the graph."""

    name = "write"

    def __init__(self, transport: Callable[[], Transport], rooms: Rooms) -> None:
        self._transport, self._rooms = transport, rooms

    def requires(self, work: Work) -> bool:
        """Tell whether the plan changes anything."""
        if work.decision is None or work.whole:
            return False
        decided, limit = work.decision, work.limit_bytes
        if work.streamed.nodes or decided.segmentation or not decided.plan.is_empty:
            return True
        if work.task.specialised.sums is not None:  # it takes what is planned only without its conditions
            return True
        return bool(work.held_bytes) and limit is not None and decided.peak_bytes + work.held_bytes > limit

    def apply(self, work: Work) -> Work:
        """Write the plan's nodes into the GraphDef, and make room for small buffers and batches."""
        assert work.decision is not None and work.step is not None  # noqa: S101 - required
        decided, transport = work.decision, self._transport()
        streamed = work.streamed
        transport.require_room(work.stored_bytes)
        edits = write_decision(work.graph_def, work.step, decided, transport, work.sums)
        edits = replace(edits, nodes=(*edits.nodes, *streamed.nodes, *work.stacked.nodes))
        small, batches = rooms_of(decided.case, decided.plan, work.limit_bytes)
        self._rooms.make_small(small, work.device.name, work.residents.pending)
        self._rooms.make_for_batches(batches, work.device.name)
        return replace(work, edits=edits)


class Validating:
    """Checks the edited graph, for TensorFlow would silently run a step with a bad one unoptimized."""

    name = "validate"

    def requires(self, work: Work) -> bool:
        """Tell whether the graph was changed."""
        return work.edits is not None

    def apply(self, work: Work) -> Work:
        """Raise an error if the edited graph is not valid."""
        assert work.table is not None and work.edits is not None  # noqa: S101 - required
        validate(work.graph_def, work.table, work.outputs, work.edits.nodes, work.place.kernels)
        return work
