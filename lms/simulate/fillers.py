"""Find fillers: memory that is taken so that TensorFlow's allocator hands out no more than is asked for.

The allocator gives a buffer the smallest free chunk that is large enough, and all of it unless at least half
would remain. A buffer of 168 MiB takes a free chunk of 211 MiB whole, and the next one finds no room. So an
op of ours (``lms/ops/filler.cc``) runs right before: it sees what the buffer would be given, and takes the
rest. Once the op that makes the buffer is done, or a buffer that came back is there, the rest is freed.
"""

from collections.abc import Collection, Mapping
from itertools import pairwise
from typing import NamedTuple

from lms.ir.graph import Graph
from lms.ir.liveness import GRANULE_BYTES, positions
from lms.ir.swap_plan import Filler, SwapPlan
from lms.simulate.allocation_trace import Demand
from lms.simulate.rehearsal import STEPS, Rehearsal, steps_to_run

SHARES = (8, 64)
"""From which part of the region on a rest is worth a filler: first few fillers are tried, then more."""


UNFIT = ("Loop", "Merge")
"""Ops that get no filler. What a loop needs is the peak of many allocations; what waits for the inputs of a
``Merge`` runs only if none of them is dead."""


def find_fillers(
    demand: Demand,
    size: int,
    graph: Graph,
    plan: SwapPlan,
    chain: Collection[int],
    *,
    overlaps: bool,
    share: int = SHARES[-1],
) -> tuple[Filler, ...]:
    """Find a filler for each buffer that would be given much more than it asks for.

    Args:
        demand: What a step allocates and when, by the plan.
        size: Bytes of the region, not counting the variables that the step moves.
        graph: The step.
        plan: Its plan, without fillers.
        chain: The ops that run one after the other; only they get fillers.
        overlaps: Whether copies run beside compute: an op then waits for no copies that others read.
        share: The part of the region from which on a rest is worth a filler.

    Returns:
        The fillers in plan order. Whether the buffers find room with them is left to be seen.
    """
    least = max(GRANULE_BYTES, size // share)
    places = _places(graph, plan, chain, least, overlaps)
    parts, run = _parts(demand, places, least), Rehearsal(demand, size, pooled=True)
    filler = run.add_register()
    found: dict[int, Filler] = {}
    for _ in range(steps_to_run(demand, STEPS)):
        if not all(_played(run, filler, part, places, found) for part in parts):
            break  # what was found so far may do
        run.end_step()
    return tuple(made for _, made in sorted(found.items()))


def _places(
    graph: Graph, plan: SwapPlan, chain: Collection[int], least: int, overlaps: bool
) -> Mapping[int, Filler]:
    """Return by point the fillers that there may be."""
    place = positions(plan.order)
    in_order = [op for op in plan.order if op in chain]
    before = {op: earlier for earlier, op in pairwise(in_order)}
    readers: dict[int, set[int]] = {}
    for swap in plan.swaps:
        for back in swap.swap_ins:
            first = min((use.op for use in back.uses), key=place.__getitem__)
            readers.setdefault(back.trigger, set()).add(first)
    found: dict[int, Filler] = {}
    for op, follower in pairwise(in_order):
        if graph.ops[op].type not in UNFIT:
            found[2 * place[op]] = Filler(op, False, (), least, follower, op, follower)
        until = min(readers.get(op, ()), key=place.__getitem__, default=None)
        if until is not None and until in before and not (overlaps and len(readers[op]) > 1):
            found[2 * place[op] + 1] = Filler(op, True, (), least, follower, before[until], until)
    return found


class _Part(NamedTuple):
    """Calls of the allocator in their order."""

    point: int | None
    """The point of all of them where a filler may be, else ``None``."""
    sizes: list[int]
    """Bytes of each buffer that is allocated there."""
    calls: list[tuple[int, int]]


def _parts(demand: Demand, places: Collection[int], least: int) -> list[_Part]:
    """Divide a step's calls: those of a point with a buffer of at least ``least`` bytes are one part."""
    tape, largest = demand.tape, dict[int, int]()
    for register, nbytes in tape.calls:
        if nbytes > 0:
            largest[tape.points[register]] = max(nbytes, largest.get(tape.points[register], 0))
    parts = [_Part(None, [], [])]
    for register, nbytes in tape.calls:
        if nbytes > 0:
            point = tape.points[register]
            at = point if point in places and largest[point] >= least else None
            if at != parts[-1].point:
                parts.append(_Part(at, [], []))
            if at is not None:
                parts[-1].sizes.append(nbytes)
        parts[-1].calls.append((register, nbytes))
    return parts


def _played(
    run: Rehearsal, filler: int, part: _Part, places: Mapping[int, Filler], found: dict[int, Filler]
) -> bool:
    """Play a part behind a filler, and keep the filler if it took anything."""
    if part.point is None:
        return run.play(part.calls)
    made = places[part.point]._replace(sizes=tuple(part.sizes))
    if run.take_rest(filler, made.sizes, made.least):
        found[part.point] = made
    return run.play([*part.calls, (filler, 0)])
