"""Mend a plan whose bytes fit but whose buffers do not: send away buffers that are neighbours in memory.

Where a large buffer finds no free chunk although its bytes are there, it does not help to send away just any
buffer: the new gap must be large enough, together with the free memory at its sides. So a planned step is
rehearsed in the allocator up to the first buffer that finds no chunk. The cheapest stretch of neighbouring
chunks that holds it is made free right there: by further trips, by copies back that begin later, and by waits
for copies to the host that come sooner. What was allocated before mostly lies where it lay, so that most
mends bring the rehearsal further.

That neighbours must go together is from Zhang et al., "Coop: Memory is not a Commodity", NeurIPS 2023, which
evicts them at run time, to recompute them.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from heapq import nsmallest
from operator import itemgetter
from typing import NamedTuple

from lms.ir.liveness import positions
from lms.ir.swap_plan import SwapPlan
from lms.schedule.op_order import executor_order
from lms.schedule.schedule import Schedule, Trip
from lms.simulate.allocation_trace import Demand
from lms.simulate.rehearsal import Chunk, Stuck, first_stuck
from lms.swaps.case import Case, Cost, Way
from lms.swaps.swap_planner import plan_trips

ANOTHER_TIME = 0.4
"""The cost of a byte whose copy runs or ends at another time. A byte that is copied once more costs 1."""
STRETCHES = 2
"""The cheapest stretches of chunks of which the one is taken that has compute wait the least."""

Before = Mapping[Trip, Trip | None]
"""The trips that mends have made, each with the one of the first plan in whose place it is, if any."""


class _Change(NamedTuple):
    """What frees a chunk: a trip more, or another in place of an old one."""

    cost: float
    new: Trip
    old: Trip | None = None


def demand_of(case: Case, made: SwapPlan) -> Demand:
    """Return what the steps of a plan allocate."""
    return Demand.of(
        case.buffers,
        executor_order(case.graph, ahead=case.costs.overlaps) if made.is_empty else made.order,
        made.swaps,
        case.costs.resident_bytes,
        made.fillers,
        made.batches,
        edited=not made.is_empty,
    )


def mend(
    case: Case, way: Way, sizes: Sequence[int], most: int, most_cost: Cost
) -> tuple[SwapPlan | None, int]:
    """Change trips, and add some, until all buffers find room.

    Args:
        case: The step.
        way: A plan within its budget, with its trips, whose buffers find no room.
        sizes: Bytes of regions, each of which must hold the step.
        most: How many mends to try; each plans the step up to :data:`STRETCHES` times.
        most_cost: The most that the plan may cost.

    Returns:
        The plan, or ``None`` where none was found; and how many mends were tried.
    """
    made, before, done = way.plan, dict[Trip, Trip | None](), 0
    while (stuck := _first_stuck(case, made, sizes)) is not None:
        options = _mended(case, way, made, before, stuck) if done < most else []
        if not options:
            return None, done
        done += 1
        cost, made, before = min(options, key=itemgetter(0))
        if cost > most_cost:
            return None, done
    if done > 1:
        made = _spared(case, way, made, before, sizes, most - done)
    return made, done


def _mended(
    case: Case, way: Way, made: SwapPlan, before: Before, stuck: Stuck
) -> list[tuple[Cost, SwapPlan, dict[Trip, Trip | None]]]:
    """Return the plans in each of which the buffer that is stuck finds room, as far as can be foreseen."""
    if stuck.register not in demand_of(case, made).tape.points:
        return []  # the copy of a variable whose chunk another has, too
    options = []
    for changes in _Neighbours(case, way, made, before, stuck).cheapest():
        changed = dict(before)
        for change in changes:
            changed[change.new] = None if change.old is None else changed.pop(change.old, change.old)
        option = _with_trips(case, way, changed)
        options.append((case.cost(option), option, changed))
    return options


def _with_trips(case: Case, way: Way, before: Before) -> SwapPlan:
    return plan_trips(case, way.schedule, _trips(way, before), way.budget_bytes)


def _trips(way: Way, before: Before) -> Iterable[Trip]:
    return ({*way.trips} - {*before.values()}) | before.keys()


def _spared(
    case: Case, way: Way, made: SwapPlan, before: Before, sizes: Sequence[int], most: int
) -> SwapPlan:
    """Return the plan without what later mends have made needless, of which ``most`` trips are looked at."""
    nbytes = case.buffers.nbytes
    for trip in sorted(before, key=lambda trip: (-nbytes[trip.tensor], trip.tensor, trip.left))[:most]:
        fewer = {new: old for new, old in before.items() if new != trip}
        plan = _with_trips(case, way, fewer)
        if plan.feasible and _first_stuck(case, plan, sizes) is None:
            made, before = plan, fewer
    return made


def _first_stuck(case: Case, made: SwapPlan, sizes: Iterable[int]) -> Stuck | None:
    demand = demand_of(case, made)
    found = (first_stuck(demand, size, pooled=not made.is_empty) for size in sizes)
    return next((stuck for stuck in found if stuck is not None), None)


class _Neighbours:
    """The memory at the moment when a buffer finds no chunk, and what would free it."""

    def __init__(self, case: Case, way: Way, made: SwapPlan, before: Before, stuck: Stuck) -> None:
        self._schedule: Schedule = way.schedule
        self._stuck, self._before = stuck, before
        self._tape = demand_of(case, made).tape
        self._trips = {(trip.tensor, trip.left): trip for trip in _trips(way, before)}
        self._leaving = {trip.tensor for trip in self._trips.values()}
        self._point = self._tape.points[stuck.register]
        position = positions(made.order)
        places = [position[op] for op in self._schedule.chain]
        self._step = bisect_right(places, self._point // 2) - 1
        """The step that waits for copies to the host: the buffer is allocated in it or behind it."""
        is_behind = self._step >= 0 and self._point > 2 * places[self._step]
        self._next = self._step + is_behind
        """The first step behind which a copy back may begin: what comes back before is there by then."""

    def cheapest(self) -> list[list[_Change]]:
        """Return the changes that make room at the least cost, two ways of it; none where no changes do."""
        found = [(0.0, [later])] if (later := self._comes_later()) is not None else []
        chunks = self._stuck.chunks
        changes = [None if chunk.is_free else self._freed(chunk) for chunk in chunks]
        for begin, first in enumerate(chunks):
            needed, end, stretch = self._stuck.nbytes, first.offset, []
            for chunk, change in zip(chunks[begin:], changes[begin:], strict=True):
                # A stretch ends at what must stay, and where a region of the pool does.
                if chunk.offset != end or (change is None and not chunk.is_free):
                    break
                if change is not None:
                    stretch.append(change)
                needed, end = needed - chunk.nbytes, chunk.offset + chunk.nbytes
                if needed <= 0:
                    found.append((sum(one.cost for one in stretch), stretch))
                    break
        return [stretch for _, stretch in nsmallest(STRETCHES, found, key=itemgetter(0))]

    def _comes_later(self) -> _Change | None:
        """Return the change that delays the copy back that finds no room.

        It begins halfway to its reader, and where a mend has delayed it before, just in time.
        """
        tensor = self._tape.tensors.get(self._stuck.register)
        trips = (trip for trip in self._trips.values() if trip.tensor == tensor)
        trip = next((trip for trip in trips if trip.trigger == self._step), None)
        if trip is None or trip.back - trip.trigger < 2:
            return None
        later = trip.back - 1 if trip in self._before else (trip.trigger + trip.back) // 2
        return _Change(0.0, trip._replace(trigger=later), trip)

    def _freed(self, chunk: Chunk) -> _Change | None:
        """Return the change that has a chunk free where the buffer is stuck; ``None`` if there is none."""
        tensor = None if chunk.register is None else self._tensor_of(chunk.register)
        if tensor is None or tensor not in self._schedule.uses:
            return None
        uses = self._schedule.uses[tensor]
        behind = bisect_left(uses, self._step)
        if not 0 < behind < len(uses) or uses[behind] <= self._next:
            return None
        left, back, nbytes = uses[behind - 1], uses[behind], self._schedule.buffers.nbytes[tensor]
        trip = self._trips.get((tensor, left))
        if trip is None:
            copies = 1 if tensor in self._leaving else 2
            return _Change(nbytes * copies, Trip(tensor, left, back, trigger=back - 1, freed=self._step))
        if trip.trigger < self._next:
            return _Change(nbytes * ANOTHER_TIME, trip._replace(trigger=self._next), trip)
        if trip.freed is not None and trip.freed > self._step:
            return _Change(nbytes * ANOTHER_TIME, trip._replace(freed=self._step), trip)
        return None

    def _tensor_of(self, register: int) -> int | None:
        """Return the buffer that has a register's chunk at the moment: kernels hand chunks on."""
        handed = [tensor for point, tensor in self._tape.handed.get(register, ()) if point <= self._point]
        return handed[-1] if handed else self._tape.tensors.get(register)
