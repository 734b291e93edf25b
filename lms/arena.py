"""Whether the buffers of steps find room one beside the other: a simulation of TensorFlow's BFC allocator.

A plan whose bytes fit can still fail, because free memory lies in pieces. The allocator takes the smallest
free chunk that is large enough, hands out all of it unless at least half would remain, and joins free
neighbours.
"""

from bisect import bisect_left, insort
from collections import Counter
from heapq import heappop, heappush

from lms.demand import Demand, Update
from lms.liveness import Residency

SMALLEST_BYTES = 4096
"""Smaller buffers fill gaps that the larger ones leave."""

STEPS = 10
"""Each step leaves its updated variables elsewhere. One plan for a ResNet-50 with momentum finds room here in
155 MiB for one step, in 178 for four, in 196 for ten and in 200 for forty."""

LARGEST_WASTE_BYTES = 128 << 20
"""``kMaxInternalFragmentation``: a chunk with more to spare is always split."""


class Arena:
    """One region of device memory; chunks are known by their offset."""

    def __init__(self, size: int) -> None:
        self._size = {0: size}
        self._before: dict[int, int | None] = {0: None}
        self._free: list[tuple[int, int]] = [(size, 0)]
        self._taken: set[int] = set()

    def allocate(self, nbytes: int) -> int | None:
        """The offset of a chunk of at least ``nbytes``; ``None`` when no free one is large enough."""
        index = bisect_left(self._free, (nbytes, 0))
        if index == len(self._free):
            return None
        size, offset = self._free.pop(index)
        if size >= 2 * nbytes or size - nbytes >= LARGEST_WASTE_BYTES:
            self._split(offset, nbytes)
        self._taken.add(offset)
        return offset

    def reserve(self, nbytes: int) -> int:
        """The offset of a chunk of exactly ``nbytes``, cut off the largest free one, which must hold it."""
        size, offset = self._free.pop()
        if size > nbytes:
            self._split(offset, nbytes)
        self._taken.add(offset)
        return offset

    def size_of(self, offset: int) -> int:
        """Bytes of a chunk; may be more than was asked for."""
        return self._size[offset]

    def release(self, offset: int) -> int:
        """Free a chunk, join it with its free neighbours, and return its bytes."""
        self._taken.discard(offset)
        size = self._size[offset]
        after = offset + self._size[offset]
        if after in self._size and after not in self._taken:
            self._join(offset, after)
        before = self._before[offset]
        if before is not None and before not in self._taken:
            self._free.remove((self._size[before], before))
            insort(self._free, (self._size[offset], offset))
            self._join(before, offset)
            offset = before
        insort(self._free, (self._size[offset], offset))
        return size

    def _split(self, offset: int, nbytes: int) -> None:
        rest, size = offset + nbytes, self._size[offset]
        if offset + size in self._before:
            self._before[offset + size] = rest
        self._size[offset], self._size[rest], self._before[rest] = nbytes, size - nbytes, offset
        insort(self._free, (size - nbytes, rest))

    def _join(self, offset: int, after: int) -> None:
        """Merge the free chunk ``after`` into its neighbour ``offset``."""
        self._free.remove((self._size[after], after))
        self._size[offset] += self._size.pop(after)
        del self._before[after]
        behind = offset + self._size[offset]
        if behind in self._before:
            self._before[behind] = offset


def peak_in_pieces(demand: Demand, size: int, steps: int = STEPS) -> int | None:
    """The most bytes in use, as the allocator counts them: what chunks have to spare is in use too.

    The first step finds the variables that it will move side by side and all else free; each later one finds
    them where the one before it has left them.

    Args:
        demand: What a step allocates and when.
        size: Bytes of the region, not counting the variables that the step moves.
        steps: How many steps to run.

    Returns:
        Bytes, not counting what these variables had before the first step; ``None`` when a buffer finds no
        chunk.
    """
    small = sum(stay.nbytes for stay in demand.stays if stay.nbytes < SMALLEST_BYTES)
    if size < small:
        return None
    run = _Run(demand, size - small)
    return run.peak + small if all(run.step() for _ in range(steps)) else None


class _Run:
    """Steps in an arena, one after the other."""

    def __init__(self, demand: Demand, size: int) -> None:
        stays = [stay for stay in demand.stays if stay.nbytes >= SMALLEST_BYTES]
        updates = [update for update in demand.updates if update.nbytes >= SMALLEST_BYTES]
        self._events: list[Residency | Update] = sorted(
            (*stays, *updates), key=lambda one: (_start_of(one), isinstance(one, Update), one[1])
        )
        self._handed_on = demand.handed_on
        moved = {update.variable: update.nbytes for update in updates}
        self._before = self._used = self._most = sum(moved.values())
        self._arena = Arena(size + self._before)
        self._variables = {variable: self._arena.reserve(nbytes) for variable, nbytes in moved.items()}
        self._ends: list[tuple[int, int]] = []
        self._held: dict[int, tuple[int, int]] = {}
        """For each buffer on the device the last point of its stay, and its chunk."""
        self._passed: Counter[int] = Counter()
        """Chunks that have a new owner when the old one's stay ends."""

    @property
    def peak(self) -> int:
        """The most bytes so far, less what the variables had at first."""
        return self._most - self._before

    def step(self) -> bool:
        """Run one step; whether all of it found room."""
        for event in self._events:
            found = self._update(event) if isinstance(event, Update) else self._stay(event)
            if not found:
                return False
        self._release_before(None)
        self._held.clear()
        return True

    def _stay(self, stay: Residency) -> bool:
        offset = self._handed_to(stay)
        self._release_before(stay.first)
        if offset is None:
            offset = self._allocate(stay.nbytes)
        if offset is None:
            return False
        self._held[stay.tensor] = stay.last, offset
        heappush(self._ends, (stay.last, offset))
        return True

    def _handed_to(self, stay: Residency) -> int | None:
        """The chunk that another buffer leaves to this one, if any does."""
        source = self._handed_on.get(stay.tensor)
        if source is None or source not in self._held:
            return None
        last, offset = self._held[source]
        if last != stay.first - 1:
            return None
        self._passed[offset] += 1
        return offset

    def _update(self, update: Update) -> bool:
        self._release_before(update.point)
        if update.source is None:
            offset = self._allocate(update.nbytes)
        else:
            _, offset = self._held[update.source]
            self._passed[offset] += 1
        if offset is None:
            return False
        heappush(self._ends, (update.freed, self._variables[update.variable]))
        self._variables[update.variable] = offset
        return True

    def _allocate(self, nbytes: int) -> int | None:
        offset = self._arena.allocate(nbytes)
        if offset is not None:
            self._used += self._arena.size_of(offset)
            self._most = max(self._most, self._used)
        return offset

    def _release_before(self, point: int | None) -> None:
        while self._ends and (point is None or self._ends[0][0] < point):
            _, offset = heappop(self._ends)
            if self._passed[offset]:
                self._passed[offset] -= 1
            else:
                self._used -= self._arena.release(offset)


def _start_of(event: Residency | Update) -> int:
    return event.point if isinstance(event, Update) else event.first
