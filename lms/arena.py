"""Whether a step's buffers find room one beside the other: a simulation of TensorFlow's BFC allocator.

A plan whose bytes fit can still fail, because free memory lies in pieces. The allocator takes the smallest
free chunk that is large enough, hands out all of it unless at least half would remain, and joins free
neighbours.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable
from heapq import heappop, heappush

from lms.liveness import Residency

SMALLEST_BYTES = 4096
"""Smaller buffers fill gaps that the larger ones leave."""

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


def peak_in_pieces(stays: Iterable[Residency], size: int) -> int | None:
    """The most bytes in use, as the allocator counts them: what chunks have to spare is in use too.

    Args:
        stays: When each buffer is on the device, as :func:`lms.liveness.timeline` gives it.
        size: Bytes of the region, empty at first.

    Returns:
        Bytes; ``None`` when a buffer finds no chunk.
    """
    stays = list(stays)
    small = sum(stay.nbytes for stay in stays if stay.nbytes < SMALLEST_BYTES)
    large = sorted(
        (stay for stay in stays if stay.nbytes >= SMALLEST_BYTES), key=lambda stay: (stay.first, stay.tensor)
    )
    arena = Arena(max(0, size - small))
    ends: list[tuple[int, int]] = []
    used = peak = 0
    for stay in large:
        while ends and ends[0][0] < stay.first:
            used -= arena.release(heappop(ends)[1])
        offset = arena.allocate(stay.nbytes)
        if offset is None:
            return None
        used += arena.size_of(offset)
        peak = max(peak, used)
        heappush(ends, (stay.last, offset))
    return peak + small
