"""Choose what to recompute: the tensors that cost the least time, or all but those between segments."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from lms.planner.recomputation import Repeats
from lms.swaps.case import Case

SHARES = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0)
"""The shares of the bytes that are dropped."""
SEGMENTS = (2, 4, 8, 16, 32)
"""The numbers of segments."""


@dataclass(frozen=True)
class Choice:
    """Which buffers are dropped, and which are kept for them."""

    dropped: frozenset[int] = frozenset()
    retained: frozenset[int] = frozenset()
    borrowed: frozenset[int] = frozenset()
    """Dropped buffers that other ops are repeated from before they are dropped."""
    ahead: int = 0
    """How many ops of the backward pass before the one that needs it an op is repeated."""


class Choices:
    """Yields choices of what to recompute of a step.

    Args:
        case: The step.
        min_bytes: Smaller tensors are kept.
    """

    def __init__(self, case: Case, min_bytes: int) -> None:
        self._case, self.repeats = case, Repeats(case.buffers, min_bytes)

    # --- what costs the least ----------------------------------------------------------------------------

    def shares(self, wanted: Iterable[float] = SHARES) -> Iterator[Choice]:
        """Yield the buffers that cost the least time a byte, up to shares of all bytes."""
        nbytes = self._case.buffers.nbytes
        sums = list(accumulate(nbytes[root] for root in self.ranked))
        for share in wanted:
            count = sum(done <= share * sums[-1] for done in sums)
            yield Choice(frozenset(self.ranked[:count]))

    @cached_property
    def _own_s(self) -> dict[int, float]:
        """The seconds that dropping a buffer alone costs."""
        seconds, chain = self._case.seconds, self.repeats.chain
        return {root: sum(seconds[op] for op in chain((root,), (root,))) for root in self.repeats.candidates}

    @cached_property
    def ranked(self) -> tuple[int, ...]:
        """The candidates, those that cost the least time a byte first."""
        nbytes = self._case.buffers.nbytes
        return tuple(sorted(self._own_s, key=lambda root: (self._own_s[root] / nbytes[root], root)))

    # --- segments ----------------------------------------------------------------------------------------

    def segments(self, wanted: Iterable[int] = SEGMENTS) -> Iterator[Choice]:
        """Yield all candidates but those that cross the cuts of the forward pass into segments."""
        candidates, saved = self.repeats.candidates, self.repeats.saved
        for count in wanted:
            kept = self._crossing(self.cuts(count))
            yield Choice(frozenset(candidates) - kept, kept - saved)

    @cached_property
    def spans(self) -> tuple[tuple[int, int, int], ...]:
        """Each buffer of the forward pass with its maker and its last reader there."""
        buffers, late = self._case.buffers, self.repeats.late
        tensors = buffers.graph.tensors
        return tuple(
            (root, tensors[root].op, max(op for op in (tensors[root].op, *early)))
            for root in buffers.owners
            if tensors[root].op not in late
            for early in [[op for op in buffers.users[root] if op not in late]]
        )

    def cuts(self, count: int) -> Sequence[int]:
        """Return ops behind which to cut: each the narrowest place about a segment behind the one before."""
        buffers, ops = self._case.buffers, len(self._case.graph.ops)
        change, made = [0] * (ops + 1), [0] * ops
        for root, first, last in self.spans:
            change[first] += buffers.nbytes[root]
            change[last] -= buffers.nbytes[root]
        for root in self.repeats.candidates:
            made[buffers.graph.tensors[root].op] += buffers.nbytes[root]
        widths = list(accumulate(change[:ops]))
        segment = sum(made) / count
        cuts: list[int] = []
        window: list[int] = []
        gathered = 0
        for op in range(ops):
            if op in self.repeats.late:
                continue
            gathered += made[op]
            if gathered >= segment / 2:
                window.append(op)
            if gathered >= segment:
                cuts.append(min(window, key=lambda one: (widths[one], -one)))
                gathered = sum(made[cuts[-1] + 1 : op + 1])
                window = []
        return cuts

    def _crossing(self, cuts: Sequence[int]) -> frozenset[int]:
        return frozenset(root for root, first, last in self.spans if any(first <= cut < last for cut in cuts))
