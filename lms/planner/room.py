"""Tell whether a plan's buffers find room on a device, step after step, and whatever comes by chance."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from lms.ir.swap_plan import SwapPlan
from lms.planner.mending import demand_of
from lms.simulate.allocation_trace import batch_bytes
from lms.simulate.executor import peaks_by_chance
from lms.simulate.rehearsal import (
    READY,
    STEPS,
    bears_batches,
    bears_late_frees,
    peak_in_pieces,
    room_in_pieces,
    small_pool_bytes,
)
from lms.swaps.case import Case

LONGER = 3
"""A plan that fits only with half of the margin must fit for this many times the steps. It must also fit
in any order of its ops (:meth:`Room.holds_any_order`), like a plan of a try that takes from the margin."""
BATCHES, LEAST_BATCHES = 4, 3
"""The most and the fewest batches that there is room for: the one that a step reads, one or two that are made
ready beside it, and one, so that a chunk is free while another is taken."""
BATCH_SHARE = 10
"""Batches, and one more to keep them apart, take at most this part of the region: by default, what the margin
leaves."""
LATE_RUNS, LATE_OPS = 10, 60_000
"""The most rehearsals of a plan with buffers that are freed late, and the ops that these may go through."""
BATCH_RUNS, BATCH_OPS = 100, 60_000
"""The most rehearsals of a plan with batches that come by chance, and the ops that these may go through: of a
small step 400 steps are rehearsed. A plan for the CPU device that bears them may take any time."""
MAY_MISS = 0.1
"""The part of these rehearsals in which a plan may not fit and be trusted all the same. Plans of two small
steps fitted in 0 and 31% of them: 3 of 3 and 1 of 2 trainings ran out of memory within 40 steps."""
BY_ORDER = "in every order of its ops"
BY_BATCHES = "beside all batches that the input pipeline may make ready"
"""Say in what case a plan that fits may not."""
LARGER = 1.04
"""The factor by which a region is enlarged until a plan that did not fit in it does."""


@dataclass(frozen=True)
class Room:
    """Say whether plans fit in what a device has for a step's own tensors, of which plans leave a part."""

    case: Case
    limit_bytes: int
    margin: float
    """The part of the limit that plans leave for what a prediction cannot know."""

    @property
    def planned_bytes(self) -> int:
        """The bytes that the margin leaves."""
        return int(self.limit_bytes * (1 - self.margin))

    @property
    def closer_bytes(self) -> int:
        """The bytes that half of the margin leaves."""
        return (self.planned_bytes + self.limit_bytes) // 2

    @property
    def sizes(self) -> tuple[int, int]:
        """The regions in which a plan must fit, in bytes: more room can put a buffer where it does harm."""
        return self.planned_bytes, self.limit_bytes

    def holds(self, made: SwapPlan, sizes: Iterable[int] | None = None, steps: int = STEPS) -> bool:
        """Tell whether a plan fits in regions of all ``sizes``, in its own order of ops.

        By default they are those of the room.
        """
        return all(
            peak_in(self.case, made, size, steps) is not None
            for size in (self.sizes if sizes is None else sizes)
        )

    def holds_any_order(self, made: SwapPlan, sizes: Sequence[int] | None = None) -> bool:
        """Tell whether a plan fits in regions of all ``sizes``, by default the whole limit, in any order."""
        return _fits_by_chance(self.case, made, (self.limit_bytes,) if sizes is None else sizes)

    def fits(self, made: SwapPlan) -> bool:
        """Tell whether a plan fits, in any order of its ops where it takes from the margin."""
        if not self.holds(made):
            return False
        peak = peak_in(self.case, made, self.limit_bytes) or 0
        return peak <= self.planned_bytes or self.holds_any_order(made)

    def fits_longer(self, made: SwapPlan) -> bool:
        """Tell whether a plan fits with half of the margin, for more steps and in any order of its ops."""
        sizes = self.closer_bytes, self.limit_bytes
        return self.holds(made, sizes, LONGER * STEPS) and self.holds_any_order(made)

    def fits_surely(self, made: SwapPlan) -> bool:
        """Tell whether a plan fits in any order of its ops, also in what the margin leaves."""
        return self.holds(made) and self.holds_any_order(made, self.sizes)

    def fits_untouched(self, untouched: SwapPlan) -> bool:
        """Tell whether a step fits as it is in what the margin leaves, in any order of its ops."""
        costs = self.case.costs
        if costs.maps_pages or untouched.peak_bytes * costs.threads <= self.planned_bytes:
            return True  # each thread has what one alone would have
        return self.holds_any_order(untouched, (self.planned_bytes,))

    def need(self, made: SwapPlan) -> tuple[int, int]:
        """Return the peak of a plan that fits, else the bytes in which it would, and the plan's own bytes."""
        return predicted_peak(self.case, made, self.limit_bytes), made.peak_bytes

    @property
    def most_batches(self) -> int:
        """The number of batches that may have room; 0 where that is too few to help, or there are none."""
        nbytes = batch_bytes(self.case.buffers) if self.case.makes_batches else 0
        batches = min(BATCHES, self.limit_bytes // BATCH_SHARE // nbytes - 1) if nbytes else 0
        return batches if batches >= LEAST_BATCHES else 0

    def with_batches(self, made: SwapPlan) -> SwapPlan:
        """Return a plan with room for batches, if it fits with that; else the plan."""
        if made.is_empty or made.fillers or not (batches := self.most_batches):
            return made
        batched = replace(made, batches=batches)
        return batched if peak_in(self.case, batched, self.limit_bytes) is not None else made

    def leaves_room(self, made: SwapPlan) -> bool:
        """Tell whether a plan fits with room for batches, too, in what half of the margin leaves.

        A plan for all that the margin leaves, and batches in all of the margin, would leave nothing for what
        a prediction cannot know.
        """
        batches = self.most_batches
        return not batches or self.holds(replace(made, batches=batches), (self.closer_bytes,))

    def bears_chance(self, made: SwapPlan) -> bool:
        """Tell whether a plan fits in all that the device has, whatever comes between its buffers by chance.

        On a GPU some buffers are freed late; on a CPU's threads that is part of :meth:`holds_any_order`, and
        batches come between.
        """
        case = self.case
        if case.costs.maps_pages or made.is_empty:
            return True
        if case.costs.overlaps:
            return bears_late_frees(demand_of(case, made), self.limit_bytes, _runs(case, LATE_RUNS, LATE_OPS))
        return all(self.rehearsed(made))

    def rehearsed(self, made: SwapPlan) -> Iterator[bool]:
        """Rehearse a plan with batches that come by chance; yield whether it fits, for each run."""
        case = self.case
        nbytes = batch_bytes(case.buffers) if case.makes_batches else 0
        # The margin is theirs, too.
        ready = min(READY, (self.limit_bytes - self.planned_bytes) // nbytes) if nbytes else 0
        if not ready:
            return
        demand = demand_of(case, self.with_batches(made))
        for seed in range(_runs(case, BATCH_RUNS, BATCH_OPS)):
            yield bears_batches(demand, self.limit_bytes, nbytes, ready, seed)

    def surest(self, options: Iterable[SwapPlan]) -> SwapPlan | None:
        """Return the first plan that fits whatever batches come beside it, else the one that mostly does.

        On a GPU the first will do: batches do not come between its buffers.
        """
        best, most = None, -1
        for made in options:
            if self.case.costs.overlaps:
                return made
            borne = list(self.rehearsed(made))
            if all(borne):
                return made
            if sum(borne) > most:
                best, most = made, sum(borne)
        return best

    def doubt_of(self, made: SwapPlan) -> str:
        """Return why a plan that fits may not by chance, on the CPU device; empty where nothing says so.

        A plan that takes from the margin may fail if other ops run side by side, and any if batches come
        between.
        """
        peak_bytes = predicted_peak(self.case, made, self.limit_bytes)
        if self.case.costs.maps_pages or made.is_empty or peak_bytes > self.limit_bytes:
            return ""
        takes_margin = made.budget_bytes is not None and made.budget_bytes < peak_bytes
        if takes_margin and not self.holds_any_order(made):
            return BY_ORDER
        return "" if self.case.costs.overlaps or self._bears_nearly_all(made) else BY_BATCHES

    def _bears_nearly_all(self, made: SwapPlan) -> bool:
        """Tell whether a plan fits in all but :data:`MAY_MISS` of the rehearsals with batches."""
        missed, most = 0, MAY_MISS * _runs(self.case, BATCH_RUNS, BATCH_OPS)
        for fits in self.rehearsed(made):
            missed += not fits
            if missed > most:
                return False
        return True


def _runs(case: Case, most: int, ops: int) -> int:
    """Return how often a step is rehearsed: at most so often, through at most so many ops, at least once."""
    return min(most, max(1, ops // max(1, len(case.graph.ops))))


def peak_in(case: Case, made: SwapPlan, size: int, steps: int = STEPS) -> int | None:
    """Return the peak of a plan's steps in a region of ``size`` bytes; ``None`` where they do not fit."""
    if case.costs.maps_pages:
        return made.peak_bytes if made.peak_bytes <= size else None
    return peak_in_pieces(demand_of(case, made), size, steps, pooled=not made.is_empty)


def _fits_by_chance(case: Case, made: SwapPlan, sizes: Sequence[int]) -> bool:
    """Tell whether a plan fits in regions of all ``sizes`` whatever runs side by side.

    On one thread without copies that is no chance.
    """
    if case.costs.threads == 1 and not (case.costs.overlaps and made.swaps):
        return True
    key = made.order, made.swaps, made.serial_edges, made.fillers, made.batches, tuple(sizes)
    if key not in case.fits_by_chance:
        case.fits_by_chance[key] = None not in peaks_by_chance(case.buffers, made, case.costs, sizes)
    return case.fits_by_chance[key]


def predicted_peak(case: Case, made: SwapPlan, limit_bytes: int | None) -> int:
    """Return the peak that the device's allocator will report for the planned step alone.

    It is above the plan's own bytes, because the allocator counts the unused rest of its chunks. Without a
    limit it is the plan's bytes; where the buffers do not fit, the smallest region in which they do.
    """
    if limit_bytes is None:
        return made.peak_bytes
    size = max(limit_bytes, made.peak_bytes)
    if (peak := peak_in(case, made, size)) is not None:
        return max(made.peak_bytes, peak)
    while peak_in(case, made, size) is None:
        size = int(size * LARGER) + 1
    return size


def grown_bytes(case: Case, made: SwapPlan, size: int) -> int:
    """Return the bytes of a region, ``size`` or more, in which the buffers fit."""
    return room_in_pieces(demand_of(case, made), size, pooled=not made.is_empty)


def rooms_of(case: Case, made: SwapPlan, limit_bytes: int | None) -> tuple[int, tuple[int, ...]]:
    """Return the bytes of the room for the planned step's small buffers, and of each batch that has room."""
    if limit_bytes is None or made.is_empty or case.costs.maps_pages:
        return 0, ()
    demand = demand_of(case, made)
    return small_pool_bytes(demand, limit_bytes), demand.room_for_batches
