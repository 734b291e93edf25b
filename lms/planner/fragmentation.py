"""Plan a step until its buffers fit in the device's memory despite fragmentation."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from math import inf
from operator import attrgetter

from lms.config import ALLOCATOR, ASYNC_ALLOCATOR, LMSConfig
from lms.ir.swap_plan import SwapPlan
from lms.planner.mending import demand_of, mend
from lms.planner.room import Room, grown_bytes
from lms.simulate.fillers import SHARES, find_fillers
from lms.swaps.case import Case, Cost
from lms.swaps.swap_planner import budget_ways, least_plans, plan_budget, plan_case

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
FILLED_OPS = 12_000
"""The most ops of a step whose plans get fillers: for each plan they take twice the time of a rehearsal."""
LATE_WORTH = 1.1
"""A plan that bears late frees may take so many times the seconds of one that does not. Where three buffers
fill half of the device hardly any plan bears them: on the stand-in GPU steps took up to 1.5 times as long
with those that do, and no step of the others ran out of memory."""
TELLING = 1.1
"""A note names an allocator without pieces where a plan may take less than its bytes over this."""


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
    if limit_bytes is None:
        made = plan_case(case, config, None)
        return _least_stored(case, config, made, None) if config.policy == "all" else made
    room = Room(case, limit_bytes, config.margin)
    return room.with_batches(_plan_alone(room, config, thorough))


def _plan_alone(room: Room, config: LMSConfig, thorough: bool) -> SwapPlan:
    """Make the plan of a step in which batches have no room of their own."""
    case, limit_bytes = room.case, room.limit_bytes
    if config.policy == "all":
        return _least_stored(case, config, _least_in_pieces(room, config), room)
    first = plan_case(case, config, limit_bytes)
    if first.policy not in ("auto", "budget"):
        return first
    if first.is_empty and not room.fits_untouched(first):
        first = plan_budget(case, room.planned_bytes if first.budget_bytes is None else first.budget_bytes)
    if case.costs.maps_pages:
        if first.peak_bytes <= limit_bytes:
            return first
        made = replace(plan_budget(case, room.planned_bytes), budget_bytes=first.budget_bytes)
        return min(first, made, key=attrgetter("peak_bytes"))
    found, tries = _first_that_fits(room, first)
    if not tries:
        return first
    if thorough or found is None:
        found = _faster(room, tries, found) or found
    options = _nearer(room, tries, first.budget_bytes) if found is None else _beside(room, found, tries)
    if (surest := room.surest(options)) is not None:
        return _told(case, surest, first)
    # The simulation cannot tell plans apart that lack a few percent: what policy all trains, this does.
    least = _least_in_pieces(room, replace(config, policy="all"))
    helps = case.streams or least.peak_bytes < case.peak_before_bytes
    return _told(case, least, first) if helps else first


def _least_in_pieces(room: Room, config: LMSConfig) -> SwapPlan:
    """Return the plan with the lowest peak whose buffers fit, or else the one that lacks least."""
    leanest = plan_case(room.case, config, room.limit_bytes)
    if room.holds(leanest, (room.limit_bytes,)):
        return leanest
    by_need = sorted(least_plans(room.case, leanest.budget_bytes), key=room.need)
    return room.surest(_filled_least(room, leanest, by_need)) or by_need[0]


def _filled_least(room: Room, leanest: SwapPlan, by_need: Sequence[SwapPlan]) -> Iterator[SwapPlan]:
    """Yield plans for the least memory that fit, with fillers where they do not without."""
    whole = (room.limit_bytes,)
    if (filled := _filled(room, leanest, whole)) is not None:
        yield filled
    yield from (made for made in by_need if room.holds(made, whole))
    for made in by_need:
        if (filled := _filled(room, made, whole)) is not None:
            yield filled


def _least_stored(case: Case, config: LMSConfig, least: SwapPlan, room: Room | None) -> SwapPlan:
    """Return the plan with the lowest peak of those whose swaps the host can hold, or ``least``."""
    if not case.costs.host_lacks(least.bytes_out):
        return least
    found, low, high = least, least.peak_bytes, case.peak_before_bytes
    if room is not None:
        high = min(high, room.limit_bytes)
    for _ in range(tries_for(len(case.graph.ops))):
        middle = (low + high) // 2
        looser = replace(config, policy="budget", margin=0.0, exclude_bytes=0, budget_bytes=middle)
        made = plan_case(case, looser, None)
        if not made.feasible or case.costs.host_lacks(made.bytes_out):
            low = middle
            continue
        high = middle
        if made.swaps and (room is None or room.holds(made, (room.limit_bytes,))):
            found = made
    if found is least:
        return least
    swapped, wanted = found.bytes_out / 2**20, least.bytes_out / 2**20
    note = f"{swapped:.1f} MiB are swapped out, not {wanted:.1f} MiB, because the host holds no more"
    return replace(found, policy=least.policy, budget_bytes=least.budget_bytes, notes=(*found.notes, note))


def _first_that_fits(room: Room, first: SwapPlan) -> tuple[SwapPlan | None, Sequence[SwapPlan]]:
    """Return the first plan that fits, if any, and all that were tried: none where the first will do.

    A step that was planned without being thorough may be planned again, and gets the same.
    """
    key, known = (first.budget_bytes, *room.sizes), room.case.tries
    if key not in known:
        fits = room.fits(first)
        if fits and room.bears_chance(first):
            known[key] = first, []
        else:
            known[key] = _for_less(room, first, first if fits else None)
    return known[key]


def _for_less(room: Room, first: SwapPlan, spare: SwapPlan | None) -> tuple[SwapPlan | None, list[SwapPlan]]:
    """Plan for less and less memory until a plan fits; return it, if any, and all that were tried.

    A plan for less than any can reach needs as much as the least does, and moves more, so that its buffers
    lie elsewhere: they may fit where those before do not. Of the ``spare`` plan and others that leave too
    little room for batches, or do not bear what comes by chance, the best is taken if no other fits.
    """
    case, most = room.case, room.planned_bytes
    made, tries = first, [first]
    allowed = first.peak_bytes
    for tried in range(tries_for(len(case.graph.ops)) if first.feasible else 0):
        share = TIGHTER - TIGHTENING * tried
        if made.feasible:
            allowed, share = made.peak_bytes, min(share, most / grown_bytes(case, made, most))
        allowed = max(1, int(allowed * share))
        made = plan_budget(case, allowed)
        tries.append(made)
        if made.peak_bytes <= most and room.fits(made):
            if spare is not None and _is_dear(case, made, spare):
                break
            if room.leaves_room(made) and room.bears_chance(made):
                return made, tries
            spare = made if spare is None else min(spare, made, key=case.cost)
    return spare, tries


def _faster(room: Room, tries: Sequence[SwapPlan], found: SwapPlan | None) -> SwapPlan | None:
    """Look for plans in the other order, and mend plans (:mod:`lms.planner.mending`), where much is to gain.

    These come nearest to the limit, and a mended plan has each buffer where a gap was made for it. So they
    must fit whichever ops run side by side, in what the margin leaves, too. A plan for a ResNet-50 that did
    so in the whole limit only ran out of memory in half of its trainings, and so did one for a U-Net that
    did in what half of the margin leaves.

    Args:
        room: What the device has for the step.
        tries: Plans for less and less memory.
        found: The plan that fits without all this, if there is one.

    Returns:
        The best plan that costs less than ``found``, or ``None`` where there is none.
    """
    case = room.case
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
            made, done = mend(case, way, room.sizes, MENDS, best)
            mends -= done
            if made is not None and made.peak_bytes <= budgets[0] and case.cost(made) < best:
                mended.append(made)
    spare = None
    for made in sorted(mended, key=case.cost):
        if room.leaves_room(made) and room.fits_surely(made):
            if room.bears_chance(made):
                return made
            spare = spare or made
    if spare is None or found is None or not room.bears_chance(found):
        return spare
    return spare if _is_dear(case, found, spare) else None


def _beside(room: Room, found: SwapPlan, tries: Iterable[SwapPlan]) -> Iterator[SwapPlan]:
    """Yield a plan that fits, and with fillers those for less and less memory."""
    yield found
    yield from _all_filled(room, tries)


def _all_filled(room: Room, plans: Iterable[SwapPlan]) -> Iterator[SwapPlan]:
    """Yield those of some plans that fit with fillers, with them."""
    return filter(None, (_filled(room, made, room.sizes) for made in plans))


def _nearer(room: Room, tries: Sequence[SwapPlan], budget_bytes: int | None) -> Iterator[SwapPlan]:
    """Yield plans that fit with half of the margin, with fillers, and for the least memory."""
    yield from filter(room.fits_longer, tries)
    yield from _all_filled(room, tries)
    for made in sorted(least_plans(room.case, budget_bytes), key=attrgetter("bytes_moved")):
        if room.holds(made):
            yield made
        yield from _all_filled(room, [made])


def _is_dear(case: Case, made: SwapPlan, other: SwapPlan) -> bool:
    """Tell whether a plan for a GPU takes too much longer than another to be taken for bearing late frees."""
    return case.costs.overlaps and case.makespan_s(made) > LATE_WORTH * case.makespan_s(other)


def _filled(room: Room, made: SwapPlan, sizes: Sequence[int]) -> SwapPlan | None:
    """Return a plan with fillers with which it fits in regions of all ``sizes``, or ``None``."""
    case = room.case
    if not case.fills or made.is_empty or not made.feasible or len(case.graph.ops) > FILLED_OPS:
        return None
    for share, found_for in product(SHARES, reversed(sizes)):
        filled = _with_fillers(case, made, found_for, share)
        if filled.fillers and room.holds(filled, sizes):
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
