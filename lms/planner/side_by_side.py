"""Mend a plan whose bytes fit but whose buffers do not: send away what lies side by side.

Where a large buffer finds no free chunk although its bytes are there, it does not help to send away just any
buffer: the new gap must be large enough, together with the free memory at its sides. So a planned step is
rehearsed in the allocator up to the first buffer that finds no chunk. The cheapest run of neighbouring chunks
that holds it is made free right there, by further trips and by copies that come back later. What was
allocated before mostly lies where it lay, so that most mends bring the rehearsal further.

That neighbours must go together is from Zhang et al., "Coop: Memory is not a Commodity", NeurIPS 2023, which
evicts them at run time, to recompute them.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence, Set
from heapq import nsmallest
from operator import itemgetter
from typing import NamedTuple

from lms.ir.liveness import positions
from lms.ir.swap_plan import SwapPlan
from lms.planner.planner import Case, Way, plan_trips
from lms.schedule.op_order import executor_order
from lms.schedule.schedule import Schedule, Trip
from lms.simulate.allocation_trace import Demand
from lms.simulate.rehearsal import STEPS, Chunk, Rehearsal, Stuck, steps_to_run

LATER = 0.2
"""What a byte costs whose copy comes back later, where one that is moved once more costs 1."""
RUNS = 2
"""The cheapest runs of chunks of which the one is taken that has compute wait the least."""


class _Change(NamedTuple):
    """What frees a chunk: a trip more, or another in place of an old one."""

    cost: float
    new: Trip
    old: Trip | None = None


def demand_of(case: Case, made: SwapPlan) -> Demand:
    """Return what the steps of a plan allocate."""
    return Demand.of(
        case.buffers,
        executor_order(case.graph) if made.is_empty else made.order,
        made.swaps,
        case.costs.resident_bytes,
        made.fillers,
        made.batches,
        edited=not made.is_empty,
    )


def mend(case: Case, way: Way, sizes: Sequence[int], most: int, most_s: float) -> tuple[SwapPlan | None, int]:
    """Add trips, and delay copies back, until all buffers find room.

    Args:
        case: The step.
        way: A plan within its budget, with its trips, whose buffers find no room.
        sizes: Bytes of regions, each of which must hold the step.
        most: How many mends to try.
        most_s: The most seconds that a step with the plan may take.

    Returns:
        The plan, or ``None`` where none was found; and how many mends were tried.
    """
    made, trips, done = way.plan, frozenset(way.trips), 0
    while (stuck := _first_stuck(case, made, sizes)) is not None:
        options = []
        for run in _Neighbours(case, way.schedule, made, trips, stuck).cheapest() if done < most else ():
            changed = (trips - {one.old for one in run if one.old is not None}) | {one.new for one in run}
            option = plan_trips(case, way.schedule, changed, way.budget_bytes)
            options.append((case.makespan_s(option), option, changed))
        if not options:
            return None, done
        done += 1
        made_s, made, trips = min(options, key=itemgetter(0))
        if made_s > most_s:
            return None, done
    if done > 1:
        made = _spared(case, way, made, trips, sizes, most - done)
    return made, done


def _spared(
    case: Case, way: Way, made: SwapPlan, trips: Set[Trip], sizes: Sequence[int], most: int
) -> SwapPlan:
    """Return the plan without what later mends have made needless, of which ``most`` trips are looked at."""
    nbytes = case.buffers.nbytes
    added = sorted(trips - {*way.trips}, key=lambda trip: (-nbytes[trip.tensor], trip.tensor, trip.left))
    for trip in added[:most]:
        fewer = plan_trips(case, way.schedule, trips - {trip}, way.budget_bytes)
        if fewer.feasible and _first_stuck(case, fewer, sizes) is None:
            made, trips = fewer, trips - {trip}
    return made


def _first_stuck(case: Case, made: SwapPlan, sizes: Sequence[int]) -> Stuck | None:
    demand = demand_of(case, made)
    steps, pooled = steps_to_run(demand, STEPS), not made.is_empty
    found = (Rehearsal(demand, size, pooled=pooled).stuck(steps) for size in sizes)
    return next((stuck for stuck in found if stuck is not None), None)


class _Neighbours:
    """The memory at the moment when a buffer finds no chunk, and what would free it."""

    def __init__(
        self, case: Case, schedule: Schedule, made: SwapPlan, trips: Set[Trip], stuck: Stuck
    ) -> None:
        self._schedule, self._stuck = schedule, stuck
        self._demand = demand_of(case, made)
        self._trips = {(trip.tensor, trip.left): trip for trip in trips}
        self._position = positions(made.order)
        self._point = self._demand.tape.points.get(stuck.register, 0)
        places = [self._position[op] for op in schedule.chain]
        self._step = bisect_right(places, self._point // 2) - 1
        """The step that waits for copies to the host: the buffer is allocated in it or behind it."""
        is_behind = self._step >= 0 and self._point > 2 * places[self._step]
        self._till = self._step + is_behind
        """The first step behind which a copy back may begin: what comes back before is there by then."""
        self._takers = {source: taker for taker, source in self._demand.handed_on.items()}

    def cheapest(self) -> list[list[_Change]]:
        """Return the changes that make room at the least cost, two ways of it; none where no changes do."""
        if (later := self._comes_later()) is not None:
            return [[later]]
        chunks = self._stuck.chunks
        changes = [None if chunk.is_free else self._freed(chunk) for chunk in chunks]
        found: list[tuple[float, list[_Change]]] = []
        for begin, first in enumerate(chunks):
            needed, end, run = self._stuck.nbytes, first.offset, []
            for chunk, change in zip(chunks[begin:], changes[begin:], strict=True):
                # A run ends at what must stay, and where a region of the pool does.
                if chunk.offset != end or (change is None and not chunk.is_free):
                    break
                if change is not None:
                    run.append(change)
                needed, end = needed - chunk.nbytes, chunk.offset + chunk.nbytes
                if needed <= 0:
                    found.append((sum(one.cost for one in run), run))
                    break
        return [run for _, run in nsmallest(RUNS, found, key=itemgetter(0))]

    def _comes_later(self) -> _Change | None:
        """Return the change that delays the copy that finds no room, halfway to its reader."""
        trip = self._trip_of(self._stuck.register) if self._point % 2 else None
        if trip is None or not trip.trigger < trip.back - 1:
            return None
        return _Change(0.0, trip._replace(trigger=(trip.trigger + trip.back) // 2), trip)

    def _freed(self, chunk: Chunk) -> _Change | None:
        """Return the change that has a chunk free where the buffer is stuck; ``None`` if there is none."""
        tensor = None if chunk.register is None else self._tensor_of(chunk.register)
        if tensor is None or tensor not in self._schedule.uses:
            return None
        uses = self._schedule.uses[tensor]
        behind = bisect_left(uses, self._step)
        if not 0 < behind < len(uses) or uses[behind] <= self._till:
            return None
        left, back, nbytes = uses[behind - 1], uses[behind], self._schedule.buffers.nbytes[tensor]
        trip = self._trips.get((tensor, left))
        if trip is None:
            return _Change(nbytes, Trip(tensor, left, back, trigger=back - 1, freed=self._step))
        if trip.trigger < self._till:
            return _Change(nbytes * LATER, trip._replace(trigger=self._till), trip)
        if trip.freed is not None and trip.freed > self._step:
            return _Change(nbytes * LATER, trip._replace(freed=self._step), trip)
        return None

    def _tensor_of(self, register: int) -> int | None:
        """Return the buffer that has a register's chunk at the moment: kernels hand chunks on."""
        tensor, graph = self._demand.tape.tensors.get(register), self._schedule.buffers.graph
        while (
            tensor is not None
            and (taker := self._takers.get(tensor)) is not None
            and 2 * self._position[graph.tensors[taker].op] <= self._point
        ):
            tensor = taker
        return tensor

    def _trip_of(self, register: int) -> Trip | None:
        """Return the trip from which a buffer comes back with a register's allocation."""
        tensor = self._demand.tape.tensors.get(register)
        found = (
            trip
            for (of, _), trip in self._trips.items()
            if of == tensor and trip.trigger == self._step < trip.back
        )
        return next(found, None)
