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

SMALLEST_BYTES = 256
"""Nothing is too small to matter: a momentum of 1 KiB keeps the free chunks at its sides apart."""

STEPS = 10
"""Each step leaves its updated variables elsewhere. One plan for a ResNet-50 with momentum finds room here in
155 MiB for one step, in 178 for four, in 196 for ten and in 200 for forty."""

LARGEST_WASTE_BYTES = 128 << 20
"""``kMaxInternalFragmentation``: a chunk with more to spare is always split."""


class Arena:
    """One region of device memory; chunks are known by their offset.

    A chunk in use need not know its neighbours: when it is freed it joins what is free before and behind it.
    """

    def __init__(self, size: int) -> None:
        self.used = 0
        """Bytes in use: whole chunks, with what they have to spare."""
        self.peak = 0
        """The most bytes in use so far."""
        self._taken: dict[int, int] = {}
        """Bytes of each chunk in use, by its offset."""
        self._free = [(size, 0)]
        """Bytes and offset of each free chunk, ascending: the first that is large enough is the best."""
        self._begins = {0: size}
        """Bytes of each free chunk, by where it begins."""
        self._ends = {size: 0}
        """Where each free chunk begins, by where it ends."""

    def allocate(self, nbytes: int) -> int | None:
        """The offset of a chunk of at least ``nbytes``; ``None`` when no free one is large enough."""
        index = bisect_left(self._free, (nbytes, 0))
        if index == len(self._free):
            return None
        size, offset = self._free.pop(index)
        splits = size >= 2 * nbytes or size - nbytes >= LARGEST_WASTE_BYTES
        self._take(offset, size, nbytes if splits else size)
        return offset

    def reserve(self, nbytes: int) -> int:
        """The offset of a chunk of exactly ``nbytes``, cut off the largest free one, which must hold it."""
        size, offset = self._free.pop()
        self._take(offset, size, nbytes)
        return offset

    def size_of(self, offset: int) -> int:
        """Bytes of a chunk in use; may be more than was asked for."""
        return self._taken[offset]

    def release(self, offset: int) -> None:
        """Free a chunk and join it with its free neighbours."""
        size = self._taken.pop(offset)
        self.used -= size
        end = offset + size
        if end in self._begins:
            behind = self._begins.pop(end)
            del self._free[bisect_left(self._free, (behind, end))]
            end += behind
        if offset in self._ends:
            begin = self._ends.pop(offset)
            del self._free[bisect_left(self._free, (offset - begin, begin))]
            offset = begin
        self._begins[offset] = end - offset
        self._ends[end] = offset
        insort(self._free, (end - offset, offset))

    def _take(self, offset: int, size: int, nbytes: int) -> None:
        """Use the first ``nbytes`` of a chunk that is on the list of free ones no more."""
        del self._begins[offset]
        if nbytes < size:
            rest = offset + nbytes
            self._begins[rest] = size - nbytes
            self._ends[offset + size] = rest
            insort(self._free, (size - nbytes, rest))
        else:
            del self._ends[offset + size]
        self._taken[offset] = nbytes
        self.used += nbytes
        if self.used > self.peak:
            self.peak = self.used


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
    tape = Tape(demand)
    run = _Run(tape, size - small)
    if not tape.moves:  # all steps are alike
        steps = min(steps, 1)
    return run.peak + small if all(run.step() for _ in range(steps)) else None


class Tape:
    """A step as a list of calls of the allocator; which chunk is whose is settled once for all steps.

    Chunks are known by registers. A variable has its own, and one more for each chunk that it gets.
    """

    def __init__(self, demand: Demand) -> None:
        self.calls: list[tuple[int, int]] = []
        """Register and bytes of an allocation; register and 0: it is freed."""
        self.variables = {
            update.variable: update.nbytes for update in demand.updates if update.nbytes >= SMALLEST_BYTES
        }
        """Bytes by variable; their registers come first, in this order."""
        self._latest = {variable: register for register, variable in enumerate(self.variables)}
        self.registers = len(self._latest)
        self._handed_on = demand.handed_on
        self._ends: list[tuple[int, int]] = []
        self._held: dict[int, tuple[int, int]] = {}
        """For each buffer on the device the last point of its stay, and its register."""
        self._passed: Counter[int] = Counter()
        """Registers that have a new owner when the old one's stay ends."""
        events: list[Residency | Update] = [*demand.stays, *demand.updates]
        for event in sorted((one for one in events if one.nbytes >= SMALLEST_BYTES), key=_when):
            if isinstance(event, Update):
                self._update(event)
            else:
                self._stay(event)
        self._free_before(None)
        self.moves = tuple(
            (register, latest) for register, latest in enumerate(self._latest.values()) if register != latest
        )
        """At the end of the step: a variable's register, and the one whose chunk it has now."""

    def _stay(self, stay: Residency) -> None:
        register = self._handed_to(stay)
        self._free_before(stay.first)
        if register is None:
            register = self._allocate(stay.nbytes)
        self._held[stay.tensor] = stay.last, register
        heappush(self._ends, (stay.last, register))

    def _handed_to(self, stay: Residency) -> int | None:
        """The register that another buffer leaves to this one, if any does."""
        source = self._handed_on.get(stay.tensor)
        if source is None or source not in self._held:
            return None
        last, register = self._held[source]
        if last != stay.first - 1:
            return None
        self._passed[register] += 1
        return register

    def _update(self, update: Update) -> None:
        self._free_before(update.point)
        if update.source is None:
            register = self._allocate(update.nbytes)
        else:
            _, register = self._held[update.source]
            self._passed[register] += 1
        heappush(self._ends, (update.freed, self._latest[update.variable]))
        self._latest[update.variable] = register

    def _allocate(self, nbytes: int) -> int:
        register = self.registers
        self.registers += 1
        self.calls.append((register, nbytes))
        return register

    def _free_before(self, point: int | None) -> None:
        while self._ends and (point is None or self._ends[0][0] < point):
            _, register = heappop(self._ends)
            if self._passed[register]:
                self._passed[register] -= 1
            else:
                self.calls.append((register, 0))


class _Run:
    """Steps in an arena, one after the other."""

    def __init__(self, tape: Tape, size: int) -> None:
        self._tape = tape
        self._before = sum(tape.variables.values())
        self._arena = Arena(size + self._before)
        self._chunks = [self._arena.reserve(nbytes) for nbytes in tape.variables.values()]
        self._chunks += [0] * (tape.registers - len(self._chunks))

    @property
    def peak(self) -> int:
        """The most bytes so far, less what the variables had at first."""
        return self._arena.peak - self._before

    def step(self) -> bool:
        """Run one step; whether all of it found room."""
        chunks, allocate, release = self._chunks, self._arena.allocate, self._arena.release
        for register, nbytes in self._tape.calls:
            if not nbytes:
                release(chunks[register])
                continue
            offset = allocate(nbytes)
            if offset is None:
                return False
            chunks[register] = offset
        for register, latest in self._tape.moves:
            chunks[register] = chunks[latest]
        return True


def _when(event: Residency | Update) -> tuple[int, bool, int]:
    """Stays before updates, at the same point."""
    if isinstance(event, Update):
        return event.point, True, event.variable
    return event.first, False, event.nbytes
