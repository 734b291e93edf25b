"""Whether a job stands still, and who waits for whom: by what ranks print and how they use the CPU."""

from collections.abc import Callable, Mapping, Set

from launch.model.idset import format_ids
from launch.system.process_load import Load

_IDLE = 0.2
"""Below so much of a CPU a rank counts as waiting; Horovod's own loop and TensorFlow's threads use less."""


class StallWatch:
    """Notices when nothing has come from any rank for a while. Use one a job."""

    def __init__(self, limit_s: float, clock: Callable[[], float]) -> None:
        self._limit_s, self._clock = limit_s, clock
        self._since = self._next = clock()
        self._before: Mapping[int, Load] = {}
        self._is_told = False
        self.progress()

    @property
    def due(self) -> float | None:
        """When to look next, by the clock; None: not before something has come."""
        return self._next if self._limit_s and not self._is_told else None

    @property
    def quiet_s(self) -> float:
        """For how long nothing has come."""
        return self._clock() - self._since

    def progress(self) -> None:
        """Take note that something has come, or that nothing is to be expected."""
        self._since = self._clock()
        self._next = self._since + self._limit_s / 2
        self._before, self._is_told = {}, False

    def look(
        self, read_loads: Callable[[], Mapping[int, Load]], running: Set[int], arrived: Set[int]
    ) -> str | None:
        """Say that the job stands still, once it does; to be asked when it is due.

        Args:
            read_loads: Reads what ranks are at; those that cannot be seen from here are left out.
            running: The ranks that run.
            arrived: Of these and former ones, who has come to ``hvd.init()``.
        """
        if self.due is None or self._clock() < self.due:
            return None
        if self._clock() < self._since + self._limit_s:
            self._before, self._next = read_loads(), self._since + self._limit_s
            return None
        quiet_s, loads = self.quiet_s, read_loads()
        self._next = self._clock() + self._limit_s
        why = name_culprits(running, loads, arrived) or self._name_idle(running, loads, quiet_s / 2)
        if not why:
            self._before = loads
            return None
        self._is_told = True
        return f"no output for {quiet_s:.0f} s: {why}"

    def _name_idle(self, running: Set[int], loads: Mapping[int, Load], span_s: float) -> str:
        idle = {
            rank
            for rank in running & loads.keys() & self._before.keys()
            if loads[rank].cpu_s - self._before[rank].cpu_s < _IDLE * span_s
        }
        if not idle:
            return ""
        busy = (running & loads.keys()) - idle
        if busy:
            return f"{_ranks(idle)} {_verb(idle, 'wait')}, {_ranks(busy)} {_verb(busy, 'compute')}"
        return f"no rank uses the CPU; {_ranks(idle)} {_verb(idle, 'wait')} for something"


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
