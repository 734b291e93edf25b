"""Whether a job stands still, and who waits for whom: by what ranks print and how they use the CPU."""

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass

from launch.model.idset import format_ids
from launch.system.process_load import Load

_IDLE = 0.2
"""Below so much of a CPU a rank counts as waiting; Horovod's own loop and TensorFlow's threads use less."""


@dataclass(frozen=True)
class Stall:
    """A job that seems to stand still."""

    line: str
    is_sure: bool
    """Whether nobody gets on: a rank that computes while others wait may be saving, or on its GPU."""


class StallWatch:
    """Notices when nothing has come from any rank for a while. Use one a job.

    Each finding is said once: one that is not sure, and later one that is.
    """

    def __init__(self, limit_s: float, clock: Callable[[], float]) -> None:
        self._limit_s, self._clock = limit_s, clock
        self._since = self._next = clock()
        self._before: Mapping[int, Load] = {}
        self._is_told = self._is_told_for_sure = False
        self.progress()

    @property
    def due(self) -> float | None:
        """When to look next, by the clock; None: not before something has come."""
        return self._next if self._limit_s and not self._is_told_for_sure else None

    @property
    def quiet_s(self) -> float:
        """For how long nothing has come."""
        return self._clock() - self._since

    def progress(self) -> None:
        """Take note that something has come, or that nothing is to be expected."""
        self._since = self._clock()
        self._next = self._since + self._limit_s / 2
        self._before = {}
        self._is_told = self._is_told_for_sure = False

    def look(
        self, read_loads: Callable[[], Mapping[int, Load]], running: Set[int], arrived: Set[int]
    ) -> Stall | None:
        """Say that the job stands still, once it does; to be asked when it is due.

        Args:
            read_loads: Reads what ranks are at; those that cannot be seen from here are left out.
            running: The ranks that run.
            arrived: Of these and former ones, who has come to ``hvd.init()``.
        """
        if self.due is None or self._clock() < self.due:
            return None
        if self._clock() < self._since + self._limit_s:
            self._remember(read_loads())
            self._next = self._since + self._limit_s
            return None
        loads = read_loads()
        self._next = self._clock() + self._limit_s
        stopped = name_culprits(running, loads, arrived)
        found = Stall(stopped, True) if stopped else self._find_idle(running, loads)
        self._remember(loads)
        if found is None or (self._is_told and not found.is_sure):
            return None
        self._is_told, self._is_told_for_sure = True, found.is_sure
        return Stall(f"no output for {self.quiet_s:.0f} s: {found.line}", found.is_sure)

    def _remember(self, loads: Mapping[int, Load]) -> None:
        self._before = loads

    def _find_idle(self, running: Set[int], loads: Mapping[int, Load]) -> Stall | None:
        before = self._before
        seen = {
            rank for rank in running & loads.keys() & before.keys() if loads[rank].at_s > before[rank].at_s
        }
        idle = {rank for rank in seen if _used(before[rank], loads[rank]) < _IDLE}
        if not idle:
            return None
        busy = (running & loads.keys()) - idle
        if busy:
            said = f"{_ranks(idle)} {_verb(idle, 'wait')}, {_ranks(busy)} {_verb(busy, 'compute')}"
            return Stall(said, False)
        return Stall(f"no rank uses the CPU; {_ranks(idle)} {_verb(idle, 'wait')} for something", True)


def _used(before: Load, now: Load) -> float:
    """Return the share of a CPU that processes have used between two looks."""
    return (now.cpu_s - before.cpu_s) / (now.at_s - before.at_s)


def name_culprits(running: Set[int], loads: Mapping[int, Load], arrived: Set[int]) -> str:
    """Name ranks for which the others certainly wait: stopped, or not come to where they meet; or nothing."""
    stopped = {rank for rank, load in loads.items() if load.is_stopped} & running
    missing = running - arrived if arrived & running else set()
    said = []
    if stopped:
        said.append(f"{_ranks(stopped)} {_is(stopped)} stopped (SIGSTOP)")
    if missing - stopped:
        waiting = arrived & running
        said.append(
            f"{_ranks(missing)} {'has' if len(missing) == 1 else 'have'} not come to hvd.init(), "
            f"where {_ranks(waiting)} {_verb(waiting, 'wait')}"
        )
    return "; ".join(said)


def _ranks(numbers: Set[int]) -> str:
    return f"{'rank' if len(numbers) == 1 else 'ranks'} {format_ids(frozenset(numbers))}"


def _verb(numbers: Set[int], verb: str) -> str:
    return f"{verb}s" if len(numbers) == 1 else verb


def _is(numbers: Set[int]) -> str:
    return "is" if len(numbers) == 1 else "are"
