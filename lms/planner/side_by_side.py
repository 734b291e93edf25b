"""Mend a plan whose bytes fit but whose buffers do not: send away what lies side by side.

Where a large buffer finds no free chunk although its bytes are there, it does not help to send away just any
buffer: the new gap must be large enough, together with the free memory at its sides. So a planned step is
rehearsed in the allocator up to the first buffer that finds no chunk. The cheapest run of neighbouring chunks
that holds it is made free right there, by further trips and by copies that come back later. What was
allocated before lies where it lay, so that each such mend brings the rehearsal further.

That neighbours must go together is from Zhang et al., "Coop: Memory is not a Commodity", NeurIPS 2023, which
evicts them at run time, to recompute them.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from math import inf
from operator import itemgetter
from typing import NamedTuple

from lms.ir.liveness import positions
from lms.ir.swap_plan import SwapPlan
from lms.schedule.schedule import Schedule, Trip
from lms.simulate.allocation_trace import Demand
from lms.simulate.bfc_arena import STEPS, Chunk, Rehearsal, Stuck, steps_to_run

LATER = 0.2
"""What a byte costs whose copy comes back later, where one that is moved once more costs 1."""


class _Change(NamedTuple):
    """What frees a chunk: a trip more, or another in place of an old one."""

    cost: float
    new: Trip
    old: Trip | None = None


def mend(
    schedule: Schedule,
    trips: Iterable[Trip],
    plan: Callable[[Iterable[Trip]], SwapPlan | None],
    demand: Callable[[SwapPlan], Demand],
    sizes: Sequence[int],
    most: int,
) -> SwapPlan | None:
    """Add trips, and delay copies back, until all buffers find room.

    Args:
        schedule: The order that is planned for.
        trips: Those of a plan whose buffers find no room.
        plan: Makes the plan of trips; ``None``: it would be too slow.
        demand: Tells what a plan's steps allocate.
        sizes: Bytes of regions, each of which must hold the step.
        most: How many mends to try.

    Returns:
        The plan; ``None`` where nothing that may move lies beside enough memory, or too much would have to.
    """
    taken = set(trips)
    for _ in range(most + 1):
        if (made := plan(taken)) is None:
            return None
        asked = demand(made)
        stuck = _first_stuck(asked, sizes)
        if stuck is None:
            return made
        changes = _Neighbours(schedule, made, asked, taken, stuck).cheapest()
        if not changes:
            return None
        taken -= {change.old for change in changes if change.old is not None}
        taken |= {change.new for change in changes}
    return None


def _first_stuck(demand: Demand, sizes: Sequence[int]) -> Stuck | None:
    found = (Rehearsal(demand, size, pooled=True).stuck(steps_to_run(demand, STEPS)) for size in sizes)
    return next((stuck for stuck in found if stuck is not None), None)


class _Neighbours:
    """The memory at the moment when a buffer finds no chunk, and what would free it."""

    def __init__(
        self, schedule: Schedule, made: SwapPlan, demand: Demand, trips: Iterable[Trip], stuck: Stuck
    ) -> None:
        self._schedule, self._demand, self._stuck = schedule, demand, stuck
        self._trips = {(trip.tensor, trip.left): trip for trip in trips}
        self._position = positions(made.order)
        self._point = demand.tape.points.get(stuck.register, 0)
        places = [self._position[op] for op in schedule.chain]
        self._step = bisect_right(places, self._point // 2) - 1
        """The step that waits for copies to the host: the buffer is allocated in it or behind it."""
        self._takers = {source: taker for taker, source in demand.handed_on.items()}

    def cheapest(self) -> list[_Change]:
        """Return the changes that make room at the least cost; none where no changes do."""
        if (later := self._comes_later()) is not None:
            return [later]
        chunks = self._stuck.chunks
        changes = [None if chunk.is_free else self._freed(chunk) for chunk in chunks]
        best: tuple[float, list[_Change]] = (inf, [])
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
                    best = min(best, (sum(one.cost for one in run), run), key=itemgetter(0))
                    break
        return best[1]

    def _comes_later(self) -> _Change | None:
        """Return the change that delays the copy that finds no room, halfway to its reader."""
        trip = self._trip_of(self._stuck.register) if self._point % 2 else None
        if trip is None or not trip.trigger < trip.back - 1:
            return None
        return _Change(0.0, trip._replace(trigger=(trip.trigger + trip.back) // 2), trip)

    def _freed(self, chunk: Chunk) -> _Change | None:
        """Return the change that has a chunk free at the step; ``None`` where there is none."""
        if chunk.register is None:
            return None
        tensor, step = self._tensor_of(chunk.register), self._step
        uses = self._schedule.uses.get(tensor, ()) if tensor is not None else ()
        behind = bisect_left(uses, step)
        if tensor is None or not 0 < behind < len(uses) or uses[behind] == step:
            return None
        left, back, nbytes = uses[behind - 1], uses[behind], self._schedule.buffers.nbytes[tensor]
        trip = self._trips.get((tensor, left))
        if trip is None:
            return _Change(nbytes, Trip(tensor, left, back, trigger=back - 1, freed=step))
        if trip.trigger < step:
            return _Change(nbytes * LATER, trip._replace(trigger=step), trip)
        if trip.freed is not None and trip.freed > step:
            return _Change(nbytes * LATER, trip._replace(freed=step), trip)
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
