"""Plan a step until its buffers fit in the device's memory despite fragmentation."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from math import inf
from operator import attrgetter

from lms.config import ALLOCATOR, ASYNC_ALLOCATOR, LMSConfig
from lms.ir.swap_plan import SwapPlan
from lms.planner.mending import demand_of, mend
from lms.planner.planner import Case, Cost, budget_ways, least_plans, plan_budget, plan_case
from lms.simulate.allocation_trace import batch_bytes
from lms.simulate.executor import peaks_by_chance
from lms.simulate.fillers import SHARES, find_fillers
from lms.simulate.rehearsal import (
    READY,
    STEPS,
    bears_batches,
    bears_late_frees,
    peak_in_pieces,
    room_in_pieces,
    small_pool_bytes,
)

TRIES = 9
MOST_OPS = 150_000
"""The ops that all further tries together may plan in each order: each costs a quarter of a second for 30,000
ops, and a limit of time would give another plan on another machine. The least plans come after them in any
case."""
TIGHTER, TIGHTENING = 0.97, 0.03
"""The first further try plans for at most this share of the bytes of the one before, and the share of each
later one is so much less, until one fits: what lacks little is found soon, what lacks much before the tries
are used up."""
MENDS, MENDED_OPS = 8, 150_000
"""The most mends of one plan, and the most ops that the mends of all plans together may go through: each goes
through the whole step. A plan of 31 mends was slower than one for less memory. Larger steps get no mends, and
plans in one order, the first that keeps to the budget: in nets of 28,000 ops neither mends nor the other
order gave a faster plan, and both took three times the time."""
WORTH = (1.02, 1.25)
"""More is tried where the plan that fits takes more than so many times the seconds of the best for the whole
budget, or moves more than so many times its bytes."""
LONGER = 3
"""A plan that fits only with half of the margin must fit for this many times the steps. It must also fit
whichever ops run side by side (:func:`_fits_by_chance`), like a plan of a try that takes from the margin."""
FILLED_OPS = 12_000
"""The most ops of a step whose plans get fillers: for each plan they take twice the time of a rehearsal."""
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
LATE_WORTH = 1.1
"""A plan that bears late frees may take so many times the seconds of one that does not. Where three buffers
fill half of the device hardly any plan bears them: on the stand-in GPU steps took up to 1.5 times as long
with those that do, and no step of the others ran out of memory."""
TELLING = 1.1
"""A note names an allocator without pieces where a plan may take less than its bytes over this."""
LARGER = 1.04
"""The factor by which a region is enlarged until a plan that did not fit in it does."""


def plan_in_pieces(
    case: Case, config: LMSConfig, limit_bytes: int | None, *, thorough: bool = True
) -> SwapPlan:
    """Make a plan whose bytes fit, and whose buffers fit despite fragmentation, step after step.

    Fragmented memory can need half as much again as its bytes say. A plan that would fail for that reason is
    made again with fewer bytes, down to the least that is possible: what policy ``all`` trains, this does.
    The least plans move several times the bytes, so before they are tried a plan may use half of the margin,
    or get fillers (:mod:`lms.simulate.fillers`), which fit one order of allocations only.

    An input pipeline makes batches ready at any time, and between the step's buffers each would have free
    memory lie in other pieces. They get room of their own where the plan fits with that, too.

    Args:
        case: The step, made ready for planning.
        config: Policy and parameters, with the ``min_tensor_bytes`` that the case was made with.
        limit_bytes: What the device has for the step's own tensors; ``None`` when that is not known.
        thorough: Whether to look for faster plans than the first one that fits. That takes most of the time,
            and is not worth it for a step of which other choices are planned, too.
    """
    made = _plan_alone(case, config, limit_bytes, thorough)
    if limit_bytes is None or made.is_empty or made.fillers or not case.makes_batches:
        return made
    return _with_batches(case, made, limit_bytes)


def _with_batches(case: Case, made: SwapPlan, limit_bytes: int) -> SwapPlan:
    """Return a plan with room for batches, if it fits with that; else the plan."""
    batches = _most_batches(case, limit_bytes)
    batched = replace(made, batches=batches)
    return batched if batches and _peak(case, batched, limit_bytes) is not None else made


def _most_batches(case: Case, limit_bytes: int) -> int:
    """Return how many batches may have room; 0 where that is too few to help, or there are none."""
    nbytes = batch_bytes(case.buffers)
    batches = min(BATCHES, limit_bytes // BATCH_SHARE // nbytes - 1) if nbytes else 0
    return batches if batches >= LEAST_BATCHES else 0


def _plan_alone(case: Case, config: LMSConfig, limit_bytes: int | None, thorough: bool) -> SwapPlan:
    """Make the plan of a step in which batches have no room of their own."""
    if config.policy == "all":
        return _least_stored(case, config, limit_bytes, _least_in_pieces(case, config, limit_bytes))
    first = plan_case(case, config, limit_bytes)
    if limit_bytes is None or first.policy not in ("auto", "budget"):
        return first
    room = int(limit_bytes * (1 - config.margin))
    if first.is_empty and not _fits_unordered(case, first, room):
        first = plan_budget(case, room if first.budget_bytes is None else first.budget_bytes)
    if case.costs.maps_pages:
        if first.peak_bytes <= limit_bytes:
            return first
        made = replace(plan_budget(case, room), budget_bytes=first.budget_bytes)
        return min(first, made, key=attrgetter("peak_bytes"))
    found, tries = _first_that_fits(case, first, room, limit_bytes)
    if not tries:
        return first
    if thorough or found is None:
        found = _faster(case, tries, found, room, limit_bytes) or found
    if found is None:
        options = _nearer(case, tries, first.budget_bytes, room, limit_bytes)
    else:
        options = _beside(case, found, tries, room, limit_bytes)
    if (surest := _surest(case, options, room, limit_bytes)) is not None:
        return _told(case, surest, first)
    # The simulation cannot tell plans apart that lack a few percent: what policy all trains, this does.
    least = _least_in_pieces(case, replace(config, policy="all"), limit_bytes)
    helps = case.streams or least.peak_bytes < case.peak_before_bytes
    return _told(case, least, first) if helps else first


def _fits_unordered(case: Case, untouched: SwapPlan, room: int) -> bool:
    """Tell whether a step fits as it is in what the margin leaves, whichever of its ops run side by side."""
    if case.costs.maps_pages or untouched.peak_bytes * case.costs.threads <= room:
        return True  # each thread has what one alone would have
    return _fits_by_chance(case, untouched, (room,))


def _least_in_pieces(case: Case, config: LMSConfig, limit_bytes: int | None) -> SwapPlan:
    """Return the plan with the lowest peak whose buffers fit, or else the one that lacks least."""
    leanest = plan_case(case, config, limit_bytes)
    if limit_bytes is None or _peak(case, leanest, limit_bytes) is not None:
        return leanest
    room = int(limit_bytes * (1 - config.margin))
    if (surest := _surest(case, _filled_least(case, leanest, limit_bytes), room, limit_bytes)) is not None:
        return surest
    return _by_need(case, leanest, limit_bytes)[0]


def _by_need(case: Case, leanest: SwapPlan, limit_bytes: int) -> list[SwapPlan]:
    """Return the plans for the least memory, those before that lack least."""
    options = least_plans(case, leanest.budget_bytes)
    return sorted(options, key=lambda made: (_need(case, made, limit_bytes), made.peak_bytes))


def _filled_least(case: Case, leanest: SwapPlan, limit_bytes: int) -> Iterator[SwapPlan]:
    """Yield plans for the least memory that fit, with fillers where they do not without."""
    if (filled := _filled(case, leanest, (limit_bytes,))) is not None:
        yield filled
    options = _by_need(case, leanest, limit_bytes)
    yield from (made for made in options if _peak(case, made, limit_bytes) is not None)
    for made in options:
        if (filled := _filled(case, made, (limit_bytes,))) is not None:
            yield filled


def _least_stored(case: Case, config: LMSConfig, limit_bytes: int | None, least: SwapPlan) -> SwapPlan:
    """Return the plan with the lowest peak of those whose swaps the host can hold, or ``least``."""
    if not case.costs.host_lacks(least.bytes_out):
        return least
    found, low, high = (
        least,
        least.peak_bytes,
        min(case.peak_before_bytes, limit_bytes or case.peak_before_bytes),
    )
    for _ in range(tries_for(len(case.graph.ops))):
        middle = (low + high) // 2
        looser = replace(config, policy="budget", margin=0.0, exclude_bytes=0, budget_bytes=middle)
        made = plan_case(case, looser, None)
        if not made.feasible or case.costs.host_lacks(made.bytes_out):
            low = middle
            continue
        high = middle
        if made.swaps and (limit_bytes is None or _peak(case, made, limit_bytes) is not None):
            found = made
    if found is least:
        return least
    swapped, wanted = found.bytes_out / 2**20, least.bytes_out / 2**20
    note = f"{swapped:.1f} MiB are swapped out, not {wanted:.1f} MiB, because the host holds no more"
    return replace(found, policy=least.policy, budget_bytes=least.budget_bytes, notes=(*found.notes, note))


def _fits(case: Case, made: SwapPlan, room: int, limit_bytes: int) -> bool:
    """Tell whether a plan's buffers find room in what the margin leaves, and in all that the device has.

    More room can put a buffer where it does harm: a plan must fit in what the device really has, too.
    """
    if _peak(case, made, room) is None or (peak := _peak(case, made, limit_bytes)) is None:
        return False
    return peak <= room or _fits_by_chance(case, made, (limit_bytes,))


def _first_that_fits(
    case: Case, first: SwapPlan, room: int, limit_bytes: int
) -> tuple[SwapPlan | None, Sequence[SwapPlan]]:
    """Return the first plan that fits, if any, and all that were tried: none where the first will do.

    A step that was planned without being thorough may be planned again, and gets the same.
    """
    key = first.budget_bytes, room, limit_bytes
    if key not in case.tries:
        fits = _fits(case, first, room, limit_bytes)
        if fits and _bears_chance(case, first, room, limit_bytes):
            case.tries[key] = first, []
        else:
            case.tries[key] = _for_less(case, first, room, limit_bytes, first if fits else None)
    return case.tries[key]


def _for_less(
    case: Case, first: SwapPlan, room: int, limit_bytes: int, spare: SwapPlan | None
) -> tuple[SwapPlan | None, list[SwapPlan]]:
    """Plan for less and less memory until a plan fits; return it, if any, and all that were tried.

    A plan for less than any can reach needs as much as the least does, and moves more, so that its buffers
    lie elsewhere: they may fit where those before do not. Of the ``spare`` plan and others that leave too
    little room for batches, or do not bear what comes by chance, the best is taken if no other fits.
    """
    made, tries = first, [first]
    allowed = first.peak_bytes
    for tried in range(tries_for(len(case.graph.ops)) if first.feasible else 0):
        share = TIGHTER - TIGHTENING * tried
        if made.feasible:
            allowed, share = made.peak_bytes, min(share, room / _room(case, made, room))
        allowed = max(1, int(allowed * share))
        made = plan_budget(case, allowed)
        tries.append(made)
        if made.peak_bytes <= room and _fits(case, made, room, limit_bytes):
            if spare is not None and _is_dear(case, made, spare):
                break
            if _leaves_room(case, made, room, limit_bytes) and _bears_chance(case, made, room, limit_bytes):
                return made, tries
            spare = made if spare is None else min(spare, made, key=case.cost)
    return spare, tries


def _faster(
    case: Case, tries: Sequence[SwapPlan], found: SwapPlan | None, room: int, limit_bytes: int
) -> SwapPlan | None:
    """Look for plans in the other order, and mend plans (:mod:`lms.planner.mending`), where much is to gain.

    These come nearest to the limit, and a mended plan has each buffer where a gap was made for it. So they
    must fit whichever ops run side by side, in what the margin leaves, too. A plan for a ResNet-50 that did
    so in the whole limit only ran out of memory in half of its trainings, and so did one for a U-Net that
    did in what half of the margin leaves.

    Args:
        case: The step.
        tries: Plans for less and less memory.
        found: The plan that fits without all this, if there is one.
        room: Bytes that the margin leaves.
        limit_bytes: What the device has for the step's own tensors.

    Returns:
        The best plan that costs less than ``found``, or ``None`` where there is none.
    """
    best: Cost = (inf, 0) if found is None else case.cost(found)
    budgets = [made.budget_bytes for made in tries if made.budget_bytes is not None]
    mends = MENDED_OPS // max(1, len(case.graph.ops))
    if mends < MENDS or not (budgets and tries[0].feasible):
        return None
    least = min(case.cost(way.plan) for way in budget_ways(case, budgets[0]))
    if all(ours <= worth * theirs for ours, worth, theirs in zip(best, WORTH, least, strict=True)):
        return None
    mended: list[SwapPlan] = []
    for budget in budgets:
        for way in budget_ways(case, budget):
            if mends < MENDS or not way.plan.feasible or case.cost(way.plan) >= best:
                continue
            made, done = mend(case, way, (room, limit_bytes), MENDS, best)
            mends -= done
            if made is not None and made.peak_bytes <= budgets[0] and case.cost(made) < best:
                mended.append(made)
    spare = None
    for made in sorted(mended, key=case.cost):
        if _leaves_room(case, made, room, limit_bytes) and _fits_surely(case, made, (room, limit_bytes)):
            if _bears_chance(case, made, room, limit_bytes):
                return made
            spare = spare or made
    if spare is None or found is None or not _bears_chance(case, found, room, limit_bytes):
        return spare
    return spare if _is_dear(case, found, spare) else None


def _fits_surely(case: Case, made: SwapPlan, sizes: Sequence[int]) -> bool:
    """Tell whether a plan fits in regions of all ``sizes``, in its own order and whichever ops meet."""
    return all(_peak(case, made, size) is not None for size in sizes) and _fits_by_chance(case, made, sizes)


def _closer(room: int, limit_bytes: int) -> int:
    """Return the bytes that half of the margin leaves."""
    return (room + limit_bytes) // 2


def _leaves_room(case: Case, made: SwapPlan, room: int, limit_bytes: int) -> bool:
    """Tell whether a plan fits with room for batches, too, in what half of the margin leaves.

    A plan for all that the margin leaves, and batches in all of the margin, would leave nothing for what a
    prediction cannot know.
    """
    batches = _most_batches(case, limit_bytes) if case.makes_batches else 0
    roomy = replace(made, batches=batches)
    return not batches or _peak(case, roomy, _closer(room, limit_bytes)) is not None


def _bears_chance(case: Case, made: SwapPlan, room: int, limit_bytes: int) -> bool:
    """Tell whether a plan fits in all that the device has, whatever comes between its buffers by chance.

    On a GPU some buffers are freed late; on a CPU's threads that is part of :func:`_fits_by_chance`, and
    batches come between.
    """
    if case.costs.maps_pages or made.is_empty:
        return True
    if case.costs.overlaps:
        return bears_late_frees(demand_of(case, made), limit_bytes, _runs(case, LATE_RUNS, LATE_OPS))
    return all(_runs_with_batches(case, made, room, limit_bytes))


def _runs_with_batches(case: Case, made: SwapPlan, room: int, limit_bytes: int) -> Iterator[bool]:
    """Rehearse a plan with batches that come by chance; yield whether it fits, for each run."""
    nbytes = batch_bytes(case.buffers) if case.makes_batches else 0
    ready = min(READY, (limit_bytes - room) // nbytes) if nbytes else 0  # the margin is theirs, too
    if not ready:
        return
    demand = demand_of(case, made if made.fillers else _with_batches(case, made, limit_bytes))
    for seed in range(_runs(case, BATCH_RUNS, BATCH_OPS)):
        yield bears_batches(demand, limit_bytes, nbytes, ready, seed)


def _bears_nearly_all(case: Case, made: SwapPlan, room: int, limit_bytes: int) -> bool:
    """Tell whether a plan fits in all but :data:`MAY_MISS` of the rehearsals with batches."""
    missed, most = 0, MAY_MISS * _runs(case, BATCH_RUNS, BATCH_OPS)
    for fits in _runs_with_batches(case, made, room, limit_bytes):
        missed += not fits
        if missed > most:
            return False
    return True


def _runs(case: Case, most: int, ops: int) -> int:
    """Return how often a step is rehearsed: at most so often, through at most so many ops, at least once."""
    return min(most, max(1, ops // max(1, len(case.graph.ops))))


def _surest(case: Case, options: Iterable[SwapPlan], room: int, limit_bytes: int) -> SwapPlan | None:
    """Return the first plan that fits whatever batches come beside it, or else the one that most often does.

    On a GPU the first will do: batches do not come between its buffers.
    """
    best, most = None, -1
    for made in options:
        if case.costs.overlaps:
            return made
        missed, runs = 0, 0
        for fits in _runs_with_batches(case, made, room, limit_bytes):
            runs += 1
            missed += not fits
        if not missed:
            return made
        if runs - missed > most:
            best, most = made, runs - missed
    return best


def _beside(
    case: Case, found: SwapPlan, tries: Iterable[SwapPlan], room: int, limit_bytes: int
) -> Iterator[SwapPlan]:
    """Yield a plan that fits, and with fillers those for less and less memory."""
    yield found
    for made in tries:
        if (filled := _filled(case, made, (room, limit_bytes))) is not None:
            yield filled


def _nearer(
    case: Case, tries: Sequence[SwapPlan], budget_bytes: int | None, room: int, limit_bytes: int
) -> Iterator[SwapPlan]:
    """Yield plans that fit with half of the margin, with fillers, and for the least memory."""
    closer = _closer(room, limit_bytes)
    for made in tries:
        longer = (_peak(case, made, size, LONGER * STEPS) for size in (closer, limit_bytes))
        if None not in longer and _fits_by_chance(case, made, (limit_bytes,)):
            yield made
    for made in tries:
        if (filled := _filled(case, made, (room, limit_bytes))) is not None:
            yield filled
    for made in sorted(least_plans(case, budget_bytes), key=attrgetter("bytes_moved")):
        if all(_peak(case, made, size) is not None for size in (room, limit_bytes)):
            yield made
        if (filled := _filled(case, made, (room, limit_bytes))) is not None:
            yield filled


def _is_dear(case: Case, made: SwapPlan, other: SwapPlan) -> bool:
    """Tell whether a plan for a GPU takes too much longer than another to be taken for bearing late frees."""
    return case.costs.overlaps and case.makespan_s(made) > LATE_WORTH * case.makespan_s(other)


def _filled(case: Case, made: SwapPlan, sizes: Sequence[int]) -> SwapPlan | None:
    """Return a plan with fillers with which it fits in regions of all ``sizes``, or ``None``."""
    if not case.fills or made.is_empty or not made.feasible or len(case.graph.ops) > FILLED_OPS:
        return None
    for share, found_for in product(SHARES, reversed(sizes)):
        filled = _with_fillers(case, made, found_for, share)
        if filled.fillers and all(_peak(case, filled, size) is not None for size in sizes):
            count = len(filled.fillers)
            keep = "filler keeps" if count == 1 else "fillers keep"
            note = f"{count} {keep} buffers from being given more memory than they ask for"
            return replace(filled, notes=(*made.notes, note))
    return None


def _with_fillers(case: Case, made: SwapPlan, size: int, share: int) -> SwapPlan:
    demand, overlaps = demand_of(case, made), case.costs.overlaps
    found = find_fillers(demand, size, case.graph, made, case.big, overlaps=overlaps, share=share)
    return replace(made, fillers=found)


def tries_for(ops: int) -> int:
    """Return how often a graph of ``ops`` ops is planned again before the least plans are tried."""
    return min(TRIES, max(1, MOST_OPS // max(1, ops)))


def _told(case: Case, made: SwapPlan, first: SwapPlan) -> SwapPlan:
    if made is first:
        return made
    wanted, planned = first.peak_bytes / 2**20, made.peak_bytes / 2**20
    told = replace(made, budget_bytes=first.budget_bytes)
    if made.peak_bytes >= first.peak_bytes:
        return told
    note = f"its tensors may take {planned:.1f} MiB, not {wanted:.1f} MiB, because free memory lies in pieces"
    if case.costs.overlaps and TELLING * planned < wanted:
        note += f"; on GPUs of NVIDIA {ALLOCATOR}={ASYNC_ALLOCATOR} avoids that"
    if made.fillers:
        return replace(told, notes=(*made.notes[-1:], note))
    # Drop the notes of a try that missed its own, tighter budget.
    return replace(told, notes=(note,) if told.feasible else (*made.notes, note))


def doubt_of(case: Case, made: SwapPlan, peak_bytes: int, limit_bytes: int | None, margin: float) -> str:
    """Return why a plan that fits may not by chance, on the CPU device; empty where nothing says so.

    A plan that takes from the margin may fail if other ops run side by side, and any if batches come between.

    Args:
        case: The step.
        made: Its plan.
        peak_bytes: What :func:`predicted_peak` says of it.
        limit_bytes: What the device has for the step's own tensors; ``None`` when that is not known.
        margin: The part of the limit that plans leave.
    """
    if limit_bytes is None or case.costs.maps_pages or made.is_empty or peak_bytes > limit_bytes:
        return ""
    takes_margin = made.budget_bytes is not None and made.budget_bytes < peak_bytes
    if takes_margin and not _fits_by_chance(case, made, (limit_bytes,)):
        return BY_ORDER
    room = int(limit_bytes * (1 - margin))
    if case.costs.overlaps or _bears_nearly_all(case, made, room, limit_bytes):
        return ""
    return BY_BATCHES


def predicted_peak(case: Case, made: SwapPlan, limit_bytes: int | None) -> int:
    """Return the peak that the device's allocator will report for the planned step alone.

    It is above the plan's own bytes, because the allocator counts the unused rest of its chunks. Without a
    limit it is the plan's bytes; where the buffers do not fit, what they would need.
    """
    if limit_bytes is None:
        return made.peak_bytes
    return max(made.peak_bytes, _need(case, made, limit_bytes))


def _need(case: Case, made: SwapPlan, limit_bytes: int) -> int:
    """Return the peak of steps that fit within the limit; else the smallest region in which they do."""
    size = max(limit_bytes, made.peak_bytes)
    if (peak := _peak(case, made, size)) is not None:
        return peak
    while _peak(case, made, size) is None:
        size = int(size * LARGER) + 1
    return size


def _room(case: Case, made: SwapPlan, room: int) -> int:
    """Return the bytes of a region, ``room`` or more, in which the buffers fit."""
    return room_in_pieces(demand_of(case, made), room, pooled=not made.is_empty)


def _peak(case: Case, made: SwapPlan, limit_bytes: int, steps: int = STEPS) -> int | None:
    if case.costs.maps_pages:
        return made.peak_bytes if made.peak_bytes <= limit_bytes else None
    return peak_in_pieces(demand_of(case, made), limit_bytes, steps, pooled=not made.is_empty)


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


def rooms_of(case: Case, made: SwapPlan, limit_bytes: int | None) -> tuple[int, tuple[int, ...]]:
    """Return the bytes of the room for the planned step's small buffers, and of each batch that has room."""
    if limit_bytes is None or made.is_empty or case.costs.maps_pages:
        return 0, ()
    demand = demand_of(case, made)
    return small_pool_bytes(demand, limit_bytes), demand.room_for_batches
