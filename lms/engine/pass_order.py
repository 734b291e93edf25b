"""The passes from a graph that TensorFlow is about to run to the edited one, in their order.

Each takes a :class:`~lms.passes.work.Work` and returns what it has come to. None of them changes the graph
but ``Holding`` and ``Streaming``, which come before the plan, ``Stacking``, which edits a copy and plans
again, and ``Writing``.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from lms.device.memory_pool import Rooms
from lms.passes.bounding import Bounding
from lms.passes.counting import Counting
from lms.passes.holding import Holding
from lms.passes.parsing import Parsing
from lms.passes.planning import Planning
from lms.passes.reading import Filtering, Reading
from lms.passes.shaping import Shaping
from lms.passes.stacking import Stacking
from lms.passes.streaming import Streaming
from lms.passes.work import Pass
from lms.passes.writing import Validating, Writing
from lms.process.resources import Resources


@dataclass(frozen=True)
class Passes:
    """The passes over a graph, in their order."""

    parse: Pass
    survey: Sequence[Pass]
    """Over the whole graph, for each device."""
    plan: Sequence[Pass]
    """Over each frame, up to its plan."""
    write: Sequence[Pass]


def standard_passes(
    used: Resources, counting: Counting, rooms: Rooms, bandwidth_gb_s: float | None
) -> Passes:
    """Return the passes of an engine that uses these resources of its process."""
    host, transport = used.host, used.transport
    claims = used.pool, transport, used.profiles, used.load_fillers, used.load_assignment
    reading, filtering, planning = Reading(), Filtering(), Planning(bandwidth_gb_s, *claims)
    return Passes(
        Parsing(),
        (Shaping(), counting, Bounding(host)),
        (
            *(Holding(), Streaming(host, transport), reading, filtering, counting, planning),
            Stacking((reading, filtering, planning)),
        ),
        (Writing(transport, rooms), Validating()),
    )
