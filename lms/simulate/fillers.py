"""Find fillers: memory that is taken so that TensorFlow's allocator hands out no more than is asked for.

The allocator gives a buffer the smallest free chunk that is large enough, and all of it unless at least half
would remain. A buffer of 168 MiB takes a free chunk of 211 MiB whole, and the next one finds no room. So an
op of ours (``lms/ops/filler.cc``) runs right before: it sees what the buffer would be given, and takes the
rest. Once the op that makes the buffer is done, or a buffer that came back is there, the rest is freed.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from lms.ir.liveness import GRANULE_BYTES, positions
from lms.ir.swap_plan import Filler, Swap
from lms.simulate.allocation_trace import Demand
from lms.simulate.bfc_arena import STEPS, Rehearsal, steps_to_run

SHARE = 64
"""A rest is worth a filler from this part of the region on."""


def find_fillers(
    demand: Demand, size: int, order: Sequence[int], chain: Collection[int], swaps: Iterable[Swap]
) -> tuple[Filler, ...]:
    """Find a filler for each buffer that would be given much more than it asks for.

    Args:
        demand: What a step allocates and when.
        size: Bytes of the region, not counting the variables that the step moves.
        order: The step's ops in the plan's order.
        chain: Those of them that run one after the other; only they get fillers.
        swaps: Those of the plan.

    Returns:
        The fillers in plan order. Whether the buffers find room with them is left to be seen.
    """
    least = max(GRANULE_BYTES, size // SHARE)
    places = _places(order, chain, swaps, least)
    parts, run = _parts(demand, places, least), Rehearsal(demand, size, pooled=True)
    filler = run.add_register()
    found: dict[int, Filler] = {}
    for _ in range(steps_to_run(demand, STEPS)):
        if not all(_played(run, filler, part, places, found) for part in parts):
            break  # what was found so far may do
        run.end_step()
    return tuple(made for _, made in sorted(found.items()))


def _places(
    order: Sequence[int], chain: Collection[int], swaps: Iterable[Swap], least: int
) -> Mapping[int, Filler]:
    """Return by point the fillers that there may be."""
    place = positions(order)
    users: dict[int, list[int]] = {}
    for swap in swaps:
        for back in swap.swap_ins:
            users.setdefault(back.trigger, []).extend(use.op for use in back.uses)
    found: dict[int, Filler] = {}
    for op, follower in pairwise(op for op in order if op in chain):
        found[2 * place[op]] = Filler(op, False, (), least, follower, follower)
        if op in users:
            first = min(users[op], key=place.__getitem__)
            found[2 * place[op] + 1] = Filler(op, True, (), least, follower, first)
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
