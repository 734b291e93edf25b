"""A row of numbers with fast "add to a range" and "largest of a range"."""

from collections.abc import Sequence

_BLOCK = 128


class MemoryProfile:
    """Bytes at each point of a schedule; whole blocks of points are added to and searched at once."""

    def __init__(self, values: Sequence[int]) -> None:
        self._values = list(values)
        starts = range(0, len(self._values), _BLOCK)
        self._added = [0] * len(starts)
        self._largest = [max(self._values[start : start + _BLOCK]) for start in starts]

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, point: int) -> int:
        return self._values[point] + self._added[point // _BLOCK]

    def add(self, first: int, last: int, nbytes: int) -> None:
        """Add ``nbytes`` at the points ``first`` to ``last``, both included; an empty range is allowed."""
        if first > last:
            return
        low, high = -(-first // _BLOCK), (last + 1) // _BLOCK
        if low > high:  # inside one block
            self._add_inside(high, first, last + 1, nbytes)
            return
        self._added[low:high] = [added + nbytes for added in self._added[low:high]]
        self._largest[low:high] = [largest + nbytes for largest in self._largest[low:high]]
        self._add_inside(low - 1, first, low * _BLOCK, nbytes)
        self._add_inside(high, high * _BLOCK, last + 1, nbytes)

    def largest(self, first: int, last: int) -> int:
        """Return the most bytes at the points ``first`` to ``last``, both included; 0 for none."""
        if first > last:
            return 0
        low, high = -(-first // _BLOCK), (last + 1) // _BLOCK
        if low > high:
            return self._largest_inside(high, first, last + 1)
        return max(
            max(self._largest[low:high], default=0),
            self._largest_inside(low - 1, first, low * _BLOCK),
            self._largest_inside(high, high * _BLOCK, last + 1),
        )

    def _add_inside(self, block: int, first: int, end: int, nbytes: int) -> None:
        if first < end:
            self._values[first:end] = [value + nbytes for value in self._values[first:end]]
            start = block * _BLOCK
            self._largest[block] = max(self._values[start : start + _BLOCK]) + self._added[block]

    def _largest_inside(self, block: int, first: int, end: int) -> int:
        return max(self._values[first:end]) + self._added[block] if first < end else 0
