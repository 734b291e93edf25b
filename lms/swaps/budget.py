"""Policy ``budget``: meet a limit in bytes while moving little and waiting less.

Three passes over the steps, each nearly linear:

1. *Evict*: where memory exceeds the budget, send away what is needed again last (Belady's rule), to come
   back just in time. The copy to the host starts when the buffer is made, long before its memory is needed.
2. *Spare*: take back every trip that the others make superfluous, the largest first.
3. *Prefetch*: start each copy back so early that the link, which carries one at a time, has it there in
   time, as far as the memory between allows.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate
from operator import add

from lms.schedule.schedule import Schedule, Trip
from lms.simulate.cost_model import Costs
from lms.simulate.range_max import MemoryProfile
from lms.simulate.step_time import clock

Rank = Callable[[int, int, int], tuple[int, ...]]
"""(bytes, left, back) of a possible trip to how unwilling we are to take it: the least goes first."""


def farthest(nbytes: int, left: int, back: int) -> tuple[int, ...]:
    """Rank a trip of a buffer that is needed again later first; among equals a larger one first."""
    return (-back, -nbytes)


def largest(nbytes: int, left: int, back: int) -> tuple[int, ...]:
    """Rank a trip that frees more bytes for more steps first."""
    return (-nbytes * (back - left), -back)


def smallest(nbytes: int, left: int, back: int) -> tuple[int, ...]:
    """Rank a trip of a smaller buffer first: where little is missing, little is moved."""
    return (nbytes, -back)


ALTERNATIVES: tuple[tuple[Rank, float], ...] = (
    (farthest, 1.0),
    (largest, 1.0),
    (smallest, 1.0),
    (farthest, 0.95),
)
"""What goes first, and to what share of the budget: memory left free lets copies back start earlier."""
FEW = 8
"""Smaller buffers first is tried where no more trips than these are taken: of many, all are about needed."""
NO_STALL = 1.02
"""A makespan this close to that of compute alone is not worth planning for again."""


@dataclass(frozen=True)
class Pace:
    """The start and end of each step, in seconds: without waiting, or as a simulation found it."""

    starts_s: tuple[float, ...]
    ends_s: tuple[float, ...]

    @classmethod
    def of(cls, schedule: Schedule, seconds: Sequence[float]) -> "Pace":
        """Return the pace of compute alone; ``seconds`` are the ops' times by id."""
        before = list(accumulate((seconds[op] for op in schedule.order), initial=0.0))
        starts = [before[place] for place, op in enumerate(schedule.order) if op in schedule.step]
        return cls(
            tuple(starts),
            tuple(start + seconds[op] for start, op in zip(starts, schedule.chain, strict=True)),
        )


def fit(schedule: Schedule, budget_bytes: int, costs: Costs, seconds: Sequence[float]) -> tuple[Trip, ...]:
    """Fit the schedule to a budget, and return the trips of the best of a few alternatives.

    The best is the closest to the budget, then the fastest, then the one that moves least. Alternatives to
    the first are only looked at while compute has to wait for copies. ``seconds`` are the ops' times by id
    (``costs.op_seconds``).
    """
    pace = Pace.of(schedule, seconds)
    nbytes = schedule.buffers.nbytes
    best: tuple[Trip, ...] = ()
    best_score: tuple[int, float, int] | None = None
    for rank, share in ALTERNATIVES:
        if rank is smallest and len(best) > FEW:
            continue
        trips = spare(schedule, evict(schedule, int(budget_bytes * share), rank), budget_bytes)
        trips = prefetch(schedule, trips, budget_bytes, costs, pace)
        memory = memory_with(schedule, trips)
        over = max(0, memory.largest(0, len(memory) - 1) - budget_bytes)
        makespan_s = clock(schedule.order, schedule.swaps(trips), costs, seconds).now_s
        score = (over, makespan_s, sum(nbytes[trip.tensor] for trip in trips))
        if best_score is None or score < best_score:
            best, best_score = trips, score
        if makespan_s <= NO_STALL * sum(seconds):
            break
    return best


def evict(schedule: Schedule, budget_bytes: int, rank: Rank) -> tuple[Trip, ...]:
    """Choose trips so that every point fits (first pass).

    Where nothing is left to send away the budget is exceeded, and the sweep goes on.
    """
    sweep = _Sweep(schedule, budget_bytes, rank)
    for step in range(len(schedule.chain)):
        sweep.make_room(2 * step, freed=step - 1)
        sweep.make_room(2 * step + 1, freed=step)
        sweep.pass_step(step)
    return tuple(sweep.trips)


class _Sweep:
    """Walks over the points in order and keeps the trips that could be taken in a heap."""

    def __init__(self, schedule: Schedule, budget_bytes: int, rank: Rank) -> None:
        self.trips: list[Trip] = []
        self._memory, self._budget, self._rank = schedule.memory, budget_bytes, rank
        self._nbytes = schedule.buffers.nbytes
        self._away = 0
        self._returning = [0] * (len(self._memory) + 1)
        self._heap: list[tuple[tuple[int, ...], int, int, int]] = []
        self._gaps: list[list[tuple[int, int]]] = [[] for _ in schedule.chain]
        for root, steps in schedule.uses.items():
            for left, back in zip(steps, steps[1:], strict=False):
                if back - left > 1:
                    self._gaps[left].append((root, back))

    def make_room(self, point: int, freed: int) -> None:
        """Send buffers away until the point fits; step ``freed`` waits for their copies."""
        self._away -= self._returning[point]
        too_early: list[tuple[tuple[int, ...], int, int, int]] = []
        while self._heap and self._memory[point] - self._away > self._budget:
            entry = heappop(self._heap)
            _, root, left, back = entry
            if 2 * back <= point:
                continue
            if left >= freed:
                too_early.append(entry)
                continue
            self.trips.append(Trip(root, left, back, trigger=back - 1, freed=freed))
            self._away += self._nbytes[root]
            self._returning[2 * back] += self._nbytes[root]
        for entry in too_early:
            heappush(self._heap, entry)

    def pass_step(self, step: int) -> None:
        """Add the buffers that the finished ``step`` used and a later one needs to the heap."""
        for root, back in self._gaps[step]:
            heappush(self._heap, (self._rank(self._nbytes[root], step, back), root, step, back))


def spare(schedule: Schedule, trips: Sequence[Trip], budget_bytes: int) -> tuple[Trip, ...]:
    """Drop each trip without which the step still fits, those with most bytes first (second pass)."""
    memory = memory_with(schedule, trips)
    nbytes = schedule.buffers.nbytes
    needed = set(trips)
    for trip in sorted(
        trips, key=lambda trip: (-nbytes[trip.tensor], trip.back - trip.left, trip.tensor, trip.left)
    ):
        first, last = schedule.away(trip)
        if memory.largest(first, last) + nbytes[trip.tensor] <= budget_bytes:
            memory.add(first, last, nbytes[trip.tensor])
            needed.discard(trip)
    return tuple(trip for trip in trips if trip in needed)


def prefetch(
    schedule: Schedule, trips: Sequence[Trip], budget_bytes: int, costs: Costs, pace: Pace
) -> tuple[Trip, ...]:
    """Move triggers to earlier steps, as far as the link and the memory allow (third pass).

    Copies start in the order in which they are needed, so that none waits behind one that is needed later.
    """
    memory = memory_with(schedule, trips)
    by_need = sorted(trips, key=lambda trip: (trip.back, trip.tensor))
    link = _Link(pace)
    early: list[Trip] = []
    for trip, start_s in zip(by_need, _latest_starts(schedule, by_need, costs, pace), strict=True):
        nbytes, trigger = schedule.buffers.nbytes[trip.tensor], trip.trigger
        seconds = costs.in_seconds(nbytes)
        start_s = max(start_s + link.stall_s, link.free_s - seconds)
        lowest = max(trip.left + 1 if trip.freed is None else trip.freed, early[-1].trigger if early else 0)
        wanted = link.last_step_done_by(start_s, lowest, trigger)
        if memory.largest(2 * wanted + 2, 2 * trigger + 1) + nbytes <= budget_bytes:
            trigger = wanted
        while trigger > wanted and max(memory[2 * trigger], memory[2 * trigger + 1]) + nbytes <= budget_bytes:
            trigger -= 1
        memory.add(2 * trigger + 2, 2 * trip.trigger + 1, nbytes)
        link.carry(trigger, trip.back, seconds)
        early.append(trip._replace(trigger=trigger))
    return tuple(early)


def postpone(
    schedule: Schedule, trips: Sequence[Trip], budget_bytes: int, costs: Costs, pace: Pace
) -> tuple[Trip, ...]:
    """Have later steps wait for the copies to the host, as far as the link needs and the memory allows.

    Only the first trip of a buffer copies it, as soon as it is made.
    """
    memory = memory_with(schedule, trips)
    made = {trip.tensor: schedule.uses[trip.tensor][0] for trip in trips}
    first: dict[int, Trip] = {}
    for trip in sorted(trips, key=lambda trip: trip.left):
        first.setdefault(trip.tensor, trip)
    free_s = 0.0
    later: dict[Trip, Trip] = {}
    for tensor in sorted(first, key=lambda tensor: (made[tensor], tensor)):
        trip, nbytes = first[tensor], schedule.buffers.nbytes[tensor]
        free_s = max(free_s, pace.ends_s[made[tensor]]) + costs.out_seconds(nbytes)
        if trip.freed is None:
            continue
        freed, wanted = trip.freed, min(trip.trigger, bisect_left(pace.starts_s, free_s))
        while freed < wanted and max(memory[2 * freed + 1], memory[2 * freed + 2]) + nbytes <= budget_bytes:
            freed += 1
        memory.add(2 * trip.freed + 1, 2 * freed, nbytes)
        later[trip] = trip._replace(freed=freed)
    return tuple(later.get(trip, trip) for trip in trips)


class _Link:
    """Simulates the copies on the link to the device, in the order of need, and the stalls they cause."""

    def __init__(self, pace: Pace) -> None:
        self.free_s = 0.0
        """When the link has carried all that it was given."""
        self.stall_s = 0.0
        self._pace = pace
        self._stalled_steps: list[int] = []
        self._stalls_s: list[float] = []

    def end_s(self, step: int) -> float:
        """Return when a step is done, in seconds, with the stalls known so far."""
        known = bisect_right(self._stalled_steps, step)
        return self._pace.ends_s[step] + (self._stalls_s[known - 1] if known else 0.0)

    def last_step_done_by(self, time_s: float, lowest: int, highest: int) -> int:
        """Return the last step of a range that is done by ``time_s``, or else the range's first."""
        behind = bisect_right(range(lowest, highest + 1), time_s, key=self.end_s)
        return lowest + max(behind - 1, 0)

    def carry(self, trigger: int, back: int, seconds: float) -> None:
        """Put a copy on the link; its reader ``back`` waits for it."""
        self.free_s = max(self.free_s, self.end_s(trigger)) + seconds
        late_s = self.free_s - (self._pace.starts_s[back] + self.stall_s)
        if late_s > 0:
            self.stall_s += late_s
            self._stalled_steps.append(back)
            self._stalls_s.append(self.stall_s)


def _latest_starts(schedule: Schedule, by_need: Sequence[Trip], costs: Costs, pace: Pace) -> list[float]:
    """Return when each copy back should start to be in time, with its own duration once more to spare."""
    starts: list[float] = []
    line_free_s = float("inf")
    for trip in reversed(by_need):
        seconds = costs.in_seconds(schedule.buffers.nbytes[trip.tensor])
        line_free_s = min(line_free_s, pace.starts_s[trip.back]) - seconds
        starts.append(line_free_s - seconds)
    return starts[::-1]


def memory_with(schedule: Schedule, trips: Sequence[Trip]) -> MemoryProfile:
    """Return the memory at the schedule's points while the trips keep their buffers away."""
    nbytes = schedule.buffers.nbytes
    change = [0] * (len(schedule.memory) + 1)
    for trip in trips:
        first, last = schedule.away(trip)
        if first <= last:
            change[first] -= nbytes[trip.tensor]
            change[last + 1] += nbytes[trip.tensor]
    return MemoryProfile(list(map(add, schedule.memory, accumulate(change))))
