"""The passes from a graph that TensorFlow is about to run to the edited one, in their order.

Each takes a :class:`~lms.passes.work.Work` and returns what it has come to. None of them changes the graph
but ``Holding`` and ``Streaming``, which come before the plan, and ``Writing``.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lms.device.memory_pool import PoolClaim, Rooms
from lms.passes.bounding import Bounding
from lms.passes.counting import Counting
from lms.passes.holding import Holding
from lms.passes.parsing import Parsing
from lms.passes.planning import Planning
from lms.passes.reading import Filtering, Reading
from lms.passes.running import Pass
from lms.passes.shaping import Shaping
from lms.passes.streaming import Streaming
from lms.passes.writing import Validating, Writing
from lms.profiling.store import Profiles
from lms.transports.base import Transport
from lms.variables.on_host import HostVariables


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
    counting: Counting,
    host: HostVariables,
    transport: Callable[[], Transport],
    rooms: Rooms,
    bandwidth_gb_s: float | None,
    claim: PoolClaim,
    profiles: Callable[[], Profiles],
    load_fillers: Callable[[], bool],
    load_assignment: Callable[[], bool],
) -> Passes:
    """Return the passes of an engine."""
    return Passes(
        Parsing(),
        (Shaping(), counting, Bounding(host)),
        (
            *(Holding(), Streaming(host, transport), Reading(), Filtering(), counting),
            Planning(bandwidth_gb_s, claim, transport, profiles, load_fillers, load_assignment),
        ),
        (Writing(transport, rooms), Validating()),
    )
