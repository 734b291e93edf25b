"""Simulate TensorFlow's BFC allocator.

A plan whose bytes fit can still fail, because free memory is fragmented. The allocator takes the smallest
free chunk that is large enough, hands out all of it unless at least half would remain, and joins free
neighbours. A pool that grows consists of regions, and chunks of two regions are never joined.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from math import ceil, log
from operator import length_hint

from lms.ir.liveness import GRANULE_BYTES
from lms.native.arena import Memory, compiled_play, flat

LARGEST_WASTE_BYTES = 128 << 20
"""``kMaxInternalFragmentation``: a chunk with more to spare is always split."""

LEFT = 8
"""Of what a buffer is given beyond what it asks for a filler leaves this part, so that small buffers that
come between do no harm. The plain 3D U-Net of ``bench/models.py`` fits with a quarter, too."""

HALF, MOST_OTHERS = 7 / 16, 8
"""A request for more than about half of a chunk is given all of it; and how many other chunks a filler takes
before it gives a place up (``kHalf`` and ``kMostOthers`` of ``lms/ops/filler.cc``)."""

FIRST_REGION_BYTES = 2 << 20
"""The first region of a pool that grows; each further one is twice as large, or as large as it takes
(``BFCAllocator::Extend``)."""

FEWEST_COMPILED = 500
"""The calls from which on the compiled loop is worth the copy of what the allocator holds."""

BORDER = 1
"""The distance between two regions, so that their chunks have no common end."""


NOWHERE = -1
"""The offset of a chunk that is not there."""


class Arena:
    """The memory of a device, in one region or in more and more; chunks are known by their offset.

    A chunk in use need not know its neighbours: when it is freed it joins what is free before and behind it.

    Args:
        size: Bytes that may be taken.
        grows: Whether regions are made when they are needed; else one is there from the start.
    """

    def __init__(self, size: int, *, grows: bool = False) -> None:
        self.size = size
        """Bytes of all regions, with those that are still to be made."""
        self.used = 0
        """Bytes in use: whole chunks, with what they have to spare."""
        self.peak = 0
        """The most bytes in use so far."""
        self._taken: dict[int, int] = {}
        """Bytes of each chunk in use, by its offset."""
        self._free: list[tuple[int, int]] = []
        """Bytes and offset of each free chunk, ascending: the first that is large enough is the best."""
        self._begins: dict[int, int] = {}
        """Where each free chunk ends, by where it begins."""
        self._ends: dict[int, int] = {}
        """Where each free chunk begins, by where it ends."""
        self._grows, self._unmade, self._end = grows, size if grows else 0, 0
        self._next = FIRST_REGION_BYTES if grows else size
        """Bytes of the region that is made next."""
        if not grows:
            self._add_region(size)

    def allocate(self, nbytes: int) -> int | None:
        """Take a free chunk of at least ``nbytes`` and return its offset, or ``None`` if there is none."""
        chunks = [0]
        return chunks[0] if self.play([(0, nbytes)], chunks, {}) == 1 else None

    def release(self, offset: int) -> None:
        """Free a chunk and join it with its free neighbours."""
        self.play([(0, 0)], [offset], {})

    def play(
        self,
        calls: Sequence[tuple[int, int]],
        chunks: list[int],
        sharers: dict[int, int],
        *,
        moves: Sequence[tuple[int, int]] = (),
        steps: int = 1,
        grows: bool = False,
    ) -> int:
        """Do what a list of calls asks for, step after step, until a buffer finds no chunk.

        Args:
            calls: See :class:`lms.simulate.allocation_trace.Tape`.
            chunks: The offset of each register's chunk.
            sharers: For each chunk that several variables have how many more than one.
            moves: Registers, each with the one whose chunk it gets when a step ends; a step that lets
                variables share a chunk is to be the only one.
            steps: How often to do it.
            grows: Whether the memory grows where there is no chunk that is large enough.

        Returns:
            The place of the call that found none; the number of calls where each found one.
        """
        is_plain = type(chunks) is list  # another list notes what it is given
        left = steps
        while left:
            begin = 0
            if is_plain and not sharers and left * len(calls) >= FEWEST_COMPILED:
                left, begin = self._play_compiled(calls, chunks, moves, left)
                if not left:
                    break
            rest = iter(calls[begin:] if begin else calls)
            if not self._play(rest, chunks, sharers, grows=grows):
                return len(calls) - 1 - length_hint(rest)
            for register, latest in moves:
                chunks[register] = chunks[latest]
            left -= 1
        return len(calls)

    def _play_compiled(
        self,
        calls: Sequence[tuple[int, int]],
        chunks: list[int],
        moves: Sequence[tuple[int, int]],
        steps: int,
    ) -> tuple[int, int]:
        """Play steps in which no chunk is shared; return how many are left, and the call to go on with.

        The loop in Python does the rest of a step where the compiled one cannot: without it, and where no
        chunk is large enough. To begin again takes a copy of all.
        """
        play, begin = compiled_play(), 0
        if play is None:
            return steps, begin
        listed = flat(calls), flat(moves)
        while steps:
            memory = Memory(self._free, self._taken, self.used, self.peak)
            stop = play(memory, *listed, chunks, steps, begin, LARGEST_WASTE_BYTES)
            if stop is None:
                break
            self._free, self._taken = [*stop.memory.free], {**stop.memory.taken}
            self.used, self.peak = stop.memory.used, stop.memory.peak
            self._begins = {offset: offset + size for size, offset in self._free}
            self._ends = {offset + size: offset for size, offset in self._free}
            steps, begin = stop.steps, stop.call
            if steps and not self._extend(calls[begin][1]):
                break
        return steps, begin

    def _play(
        self,
        calls: Iterator[tuple[int, int]],
        chunks: list[int],
        sharers: dict[int, int],
        *,
        grows: bool,
    ) -> bool:
        """Do what calls ask for, and tell whether all buffers found a chunk; else stop.

        A plan takes up to 100,000 calls, a third of the time of an edit: so this loop calls nothing itself.
        ``lms/native/arena.c`` has the same in C, for chunks that nobody shares.
        """
        free, begins, ends, taken = self._free, self._begins, self._ends, self._taken
        for register, nbytes in calls:
            if nbytes <= 0:
                offset = chunks[register]
                if offset in sharers:
                    sharers[offset] -= 1
                    if not sharers[offset]:
                        del sharers[offset]
                    if not nbytes:
                        continue
                    nbytes = -nbytes
                elif nbytes:
                    continue
                else:
                    size = taken.pop(offset, 0)
                    if not size:
                        continue  # a filler that took nothing
                    self.used -= size
                    end = offset + size
                    if (behind := begins.pop(end, None)) is not None:
                        del free[bisect_left(free, (behind - end, end))]
                        end = behind
                    if (before := ends.pop(offset, None)) is not None:
                        del free[bisect_left(free, (offset - before, before))]
                        offset = before
                    begins[offset], ends[end] = end, offset
                    insort(free, (end - offset, offset))
                    continue
            index = bisect_left(free, (nbytes, 0))
            if index == len(free):
                if not self._extend(nbytes):
                    if not grows:
                        return False
                    chunks[register] = self.grow_for(nbytes)
                    continue
                index = bisect_left(free, (nbytes, 0))
            size, offset = free.pop(index)
            end, rest = begins.pop(offset), size - nbytes
            if rest >= nbytes or rest >= LARGEST_WASTE_BYTES:
                size, begin = nbytes, offset + nbytes
                begins[begin], ends[end] = end, begin
                insort(free, (rest, begin))
            else:
                del ends[end]
            taken[offset] = size
            self.used += size
            if self.used > self.peak:
                self.peak = self.used
            chunks[register] = offset
        return True

    def take_rest(self, sizes: Sequence[int], least: int) -> tuple[int, int]:
        """Do what ``lms/ops/filler.cc`` does: take what a buffer would be given beyond what it asks for.

        On the way it takes more for a moment, which the peak counts.

        Args:
            sizes: Bytes of the buffers, in the order in which they are allocated afterwards.
            least: The fewest bytes that are worth it.

        Returns:
            The offset of the chunk that is taken, and its bytes; ``NOWHERE`` and 0 if nothing is worth it.
        """
        held: list[int] = []
        offset = self._rest(sizes, least, held)
        for other in held:
            if other != offset:
                self.release(other)
        return offset, self._taken.get(offset, 0)

    def _rest(self, sizes: Sequence[int], least: int, held: list[int]) -> int:
        """Take chunks until one of them is the rest; return its offset. All that are taken get ``held``."""
        for nbytes in sizes:
            if (offset := self.allocate(nbytes)) is None:
                return NOWHERE
            held.append(offset)
        beyond = [self._taken[offset] - nbytes for offset, nbytes in zip(held, sizes, strict=True)]
        spare = max(beyond, default=0)
        wanted = _rounded(spare - spare // LEFT)
        if spare < least or not wanted:
            return NOWHERE
        begin = held.pop(beyond.index(spare))
        given = self._taken[begin]
        self.release(begin)
        # Pieces keep the buffer's place, each the same share of what is free when it is taken.
        left = wanted / given
        count = max(1, ceil(log(left) / log(1 - HALF)))
        share = 1 - left ** (1 / count)
        pieces = (_rounded(given * share * (1 - share) ** number) for number in range(count))
        if any(self._take_within(piece, begin, given, held) == NOWHERE for piece in pieces):
            return NOWHERE
        return self._take_within(wanted, begin, given, held)

    def _take_within(self, nbytes: int, begin: int, given: int, held: list[int]) -> int:
        """Take bytes of the chunk of ``given`` bytes at ``begin``, and whole others if they are given."""
        for _ in range(MOST_OTHERS if nbytes else 0):
            if (offset := self.allocate(nbytes)) is None:
                break
            held.append(offset)
            if begin <= offset < begin + given:
                return offset
        return NOWHERE

    def reserve(self, nbytes: int) -> int:
        """Cut ``nbytes`` off the largest free chunk, which must hold them, and return the offset.

        Where regions divide the memory so that none holds them, they take as much from several.
        """
        if (not self._free or self._free[-1][0] < nbytes) and not self._extend(nbytes):
            offset = self.grow_for(nbytes)
            self.size -= nbytes
            counted = self.used, self.peak
            self.fill(nbytes)
            self.used, self.peak = counted
            return offset
        size, offset = self._free.pop()
        self._take(offset, size, nbytes)
        return offset

    def fill(self, nbytes: int) -> None:
        """Take ``nbytes`` for good, in as few pieces as there is room for."""
        while nbytes and (self._free or self._extend(1)):
            piece = min(nbytes, self._free[-1][0])
            self.reserve(piece)
            nbytes -= piece

    def grow_for(self, nbytes: int) -> int:
        """Make room for a chunk of ``nbytes`` behind all others, and return the chunk's offset."""
        if self._grows:
            self.size += nbytes
            begin = self._add_region(nbytes)
            self._free.remove((nbytes, begin))
            self._take(begin, nbytes, nbytes)
            return begin
        begin = self._ends.get(self.size, self.size)
        if begin < self.size:
            del self._free[bisect_left(self._free, (self.size - begin, begin))]
            del self._ends[self.size]
        self.size = begin + nbytes
        self._begins[begin] = self.size
        self._ends[self.size] = begin
        self._take(begin, nbytes, nbytes)
        return begin

    @property
    def chunks(self) -> int:
        """The number of chunks in use."""
        return len(self._taken)

    def size_of(self, offset: int) -> int:
        """Return the bytes of a chunk in use, which may be more than was asked for."""
        return self._taken[offset]

    def holds(self, offset: int) -> bool:
        """Tell whether a chunk in use begins there."""
        return offset in self._taken

    @property
    def layout(self) -> list[tuple[int, int]]:
        """Offset and bytes of each chunk in use, ascending; what is between them is free."""
        return sorted(self._taken.items())

    @property
    def free(self) -> list[tuple[int, int]]:
        """Offset and bytes of each free chunk."""
        return [(offset, nbytes) for nbytes, offset in self._free]

    def _extend(self, nbytes: int) -> bool:
        """Make the next region, for a chunk of ``nbytes``; tells whether that much is left."""
        if nbytes > self._unmade:
            return False
        is_enough = nbytes <= self._next
        while nbytes > self._next:
            self._next *= 2
        size = min(self._next, self._unmade)
        if is_enough:
            self._next *= 2
        self._unmade -= size
        self._add_region(size)
        return True

    def _add_region(self, size: int) -> int:
        """Add a region whose bytes are free, and return where it begins."""
        begin = self._end
        self._end = begin + size + BORDER
        insort(self._free, (size, begin))
        self._begins[begin] = begin + size
        self._ends[begin + size] = begin
        return begin

    def _take(self, offset: int, size: int, nbytes: int) -> None:
        """Mark the first ``nbytes`` of a chunk as used; the chunk is no longer in the list of free ones."""
        end = self._begins.pop(offset)
        if nbytes < size:
            rest = offset + nbytes
            self._begins[rest], self._ends[end] = end, rest
            insort(self._free, (size - nbytes, rest))
        else:
            del self._ends[end]
        self._taken[offset] = nbytes
        self.used += nbytes
        if self.used > self.peak:
            self.peak = self.used


def _rounded(nbytes: float) -> int:
    return int(nbytes) // GRANULE_BYTES * GRANULE_BYTES
