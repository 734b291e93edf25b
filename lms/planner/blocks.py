"""See a step as a chain of blocks, and choose what to recompute by a dynamic programme over them.

The forward pass is cut at its narrowest places. A run of neighbouring blocks keeps what later blocks read,
and drops of the rest what its level says: the tensors that cost the least time a byte, some or all of them.
The backward pass makes these again, from what the run and the cut before it keep. What is kept stays on the
device or goes to the host. :mod:`lms.planner.block_chain` finds the runs, their levels and what moves.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from lms.planner.block_chain import Link, Option, Path, fastest, priced
from lms.planner.choices import Choice, Choices
from lms.swaps.case import Case

LEVELS = (0.25, 0.5, 0.75, 1.0)
"""The shares of the bytes that levels drop, where they may. Level 0 drops nothing."""
NEVER = len(LEVELS) + 1
FINENESS = 8
"""About as many blocks hold what fits in the budget."""
FEWEST, MOST = 16, 64
"""The numbers of blocks that are asked for."""


class _Saved(NamedTuple):
    """A buffer of the forward pass that another block or the backward pass reads."""

    root: int
    block: int
    """The block that makes it."""
    last: int
    """The last block that reads it."""
    nbytes: int
    level: int
    """The first level that drops it; :data:`NEVER` where none may."""


class _Part(NamedTuple):
    """What a block brings to a run of some level."""

    stays: int
    """Bytes that it keeps, whatever blocks follow in the run."""
    remade: int
    """Bytes that are there again once later blocks of the run are made again."""
    alone_s: float
    """The time of what it makes again as the last block of the run."""
    followed_s: float
    """The time of what it makes again before others of the run."""
    crossing: tuple[_Saved, ...]
    """What it keeps only if the run ends before its last reader."""


class Blocks:
    """The blocks of a step.

    Args:
        case: The step.
        choices: Its choices of what to recompute: the cuts, and what dropping a tensor costs.
        budget_bytes: The most bytes that the step may take.
    """

    def __init__(self, case: Case, choices: Choices, budget_bytes: int) -> None:
        self._case, self._choices, self._repeats = case, choices, choices.repeats
        self._budget = budget_bytes
        wanted = FINENESS * case.peak_before_bytes // max(1, budget_bytes)
        self._cuts = choices.cuts(max(FEWEST, min(MOST, wanted)))
        self._count = len(self._cuts) + 1

    def choices(self, *, moves: bool) -> Iterator[Choice]:
        """Yield the choices of the best plans, those with the least estimated time first; none if none fits.

        Args:
            moves: Whether tensors may go to the host.
        """
        options = [list(self._options(block, moves=moves)) for block in range(self._count)]
        if moves:
            paths = priced(options, self._budget, self._link)
        else:
            found = fastest(options, self._budget, [0.0] * self._count)
            paths = [] if found is None else [found]
        yield from dict.fromkeys(map(self._choice, paths))

    @cached_property
    def _link(self) -> Link:
        costs, seconds, late = self._case.costs, self._case.seconds, self._repeats.late
        backward_s = sum(seconds[op] for op in late)
        return Link(costs.out_bytes_per_s, costs.in_bytes_per_s, sum(seconds) - backward_s, backward_s)

    def _choice(self, path: Path) -> Choice:
        runs = [*zip((0, *(option.end for option in path)), path, strict=False)]
        taken = [option for begin, option in runs for _ in range(begin, option.end)]
        dropped = frozenset(
            one.root
            for one in self._saved
            if one.level <= taken[one.block].level and one.last < taken[one.block].end
        )
        cuts = [begin for begin, option in runs if option.level]
        retained = frozenset(
            one.root for one in self._passing if any(one.block < cut <= one.last for cut in cuts)
        )
        return Choice(dropped, retained)

    # --- options -----------------------------------------------------------------------------------------

    def _options(self, begin: int, *, moves: bool) -> Iterator[Option]:
        """Yield the options of the runs that begin with a block."""
        for level in range(1 + len(LEVELS)):
            passing = sum(one.nbytes for one in self._passing if one.block < begin <= one.last)
            kept = there = passing if level else 0
            seconds, needed = 0.0, 0
            crossing: list[_Saved] = []
            for block in range(begin, self._count if level else begin + 1):
                part = self._parts[block][level]
                needed = max(needed, there + self._saved_bytes[block] + self._beside[block])
                if needed > self._budget:
                    break
                kept += part.stays
                crossing += part.crossing
                resident = kept + sum(one.nbytes for one in crossing if one.last > block)
                end, again_s = block + 1, seconds + part.alone_s
                yield Option(end, again_s, resident, max(needed, resident), 0, level)
                if moves and resident:
                    yield Option(end, again_s, 0, needed, resident, level)
                there += part.stays + part.remade
                seconds += part.followed_s

    @cached_property
    def _parts(self) -> list[list[_Part]]:
        return [
            [self._part(block, level) for level in range(1 + len(LEVELS))] for block in range(self._count)
        ]

    def _part(self, block: int, level: int) -> _Part:
        saved, graph, seconds = self._by_block[block], self._case.graph, self._case.seconds
        gone = [one for one in saved if one.level <= level]
        stays = self._saved_bytes[block] - sum(one.nbytes for one in gone)
        if not level:
            return _Part(stays, 0, 0.0, 0.0, ())
        passing = {one.root for one in self._passing}
        made = [one.root for one in self._passing if one.block == block]
        repeatable = [root for root in made if self._repeats.is_repeatable(graph.tensors[root].op)]
        inner = [one.root for one in gone if one.last == block]
        crossing = tuple(one for one in gone if one.last > block)
        alone = self._repeats.chain(inner, inner, passing)
        outer = (*(one.root for one in crossing), *repeatable)
        before = self._repeats.chain(outer, {one.root for one in gone}, passing)
        return _Part(
            stays,
            sum(one.nbytes for one in gone if graph.tensors[one.root].op in before),
            sum(seconds[op] for op in alone),
            sum(seconds[op] for op in alone | before),
            crossing,
        )

    # --- the step ----------------------------------------------------------------------------------------

    def _block(self, op: int) -> int:
        """Return the block of an op of the forward pass."""
        return bisect_left(self._cuts, op)

    @cached_property
    def _saved(self) -> list[_Saved]:
        """What the backward pass reads."""
        return [one for one in self._spans if one.root in self._repeats.saved]

    @cached_property
    def _passing(self) -> list[_Saved]:
        """What only the forward pass reads, in another block than its maker's."""
        return [one for one in self._spans if one.last > one.block and one.root not in self._repeats.saved]

    @cached_property
    def _spans(self) -> list[_Saved]:
        ranked, nbytes = self._choices.ranked, self._case.buffers.nbytes
        sums = list(accumulate(nbytes[root] for root in ranked))
        steps = [share * sums[-1] for share in LEVELS] if sums else []
        level = {root: 1 + bisect_left(steps, done) for root, done in zip(ranked, sums, strict=True)}
        return [
            _Saved(root, self._block(first), self._block(last), nbytes[root], level.get(root, NEVER))
            for root, first, last in self._choices.spans
        ]

    @cached_property
    def _by_block(self) -> list[list[_Saved]]:
        found: list[list[_Saved]] = [[] for _ in range(self._count)]
        for one in self._saved:
            found[one.block].append(one)
        return found

    @cached_property
    def _saved_bytes(self) -> list[int]:
        return [sum(one.nbytes for one in saved) for saved in self._by_block]

    @cached_property
    def _beside(self) -> Sequence[int]:
        """For each block the most bytes beside saved buffers while a pass goes through it."""
        late, reads = self._repeats.late, self._case.buffers.reads
        timeline = min(
            (schedule.timeline for schedule in self._case.schedules), key=lambda one: one.peak_bytes
        )
        block_of = {one.root: one.block for one in self._saved}
        change = [0] * (2 * len(timeline.order) + 2)
        for stay in timeline.residencies:
            if stay.tensor in block_of:
                change[stay.first] += stay.nbytes
                change[stay.last + 1] -= stay.nbytes
        saved = list(accumulate(change))
        most = [0] * self._count
        reached = 0
        for place, op in reversed([*enumerate(timeline.order)]):
            # The backward pass is in the last block of which it still reads something.
            reached = max([reached, *(block_of.get(root, 0) for root in reads[op] if op in late)])
            block = reached if op in late else self._block(op)
            most[block] = max(most[block], timeline.allocated[2 * place] - saved[2 * place])
        return most
