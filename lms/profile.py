"""A row of numbers with fast "add to a range" and "largest of a range"."""

from collections.abc import Sequence

_BLOCK = 128


class MemoryProfile:
    """Bytes at each point of a schedule; both operations touch a block of points at once."""

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
        for block, low, high in _pieces(first, last):
            if high - low == _BLOCK:
                self._added[block] += nbytes
                self._largest[block] += nbytes
                continue
            values = self._values
            for point in range(low, high):
                values[point] += nbytes
            start = block * _BLOCK
            self._largest[block] = max(values[start : start + _BLOCK]) + self._added[block]

    def largest(self, first: int, last: int) -> int:
        """The most bytes at the points ``first`` to ``last``, both included; 0 for an empty range."""
        best = 0
        for block, low, high in _pieces(first, last):
            whole = high - low == _BLOCK
            found = self._largest[block] if whole else max(self._values[low:high]) + self._added[block]
            best = max(best, found)
        return best


def _pieces(first: int, last: int) -> list[tuple[int, int, int]]:
    """The range cut at block borders: block, first point, point behind the last."""
    pieces = []
    for block in range(first // _BLOCK, last // _BLOCK + 1) if first <= last else ():
        start = block * _BLOCK
        pieces.append((block, max(first, start), min(last + 1, start + _BLOCK)))
    return pieces
