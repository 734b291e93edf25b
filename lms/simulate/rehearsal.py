"""Rehearse steps in the simulated allocator, to tell whether fragmentation lets their buffers fit."""

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from operator import itemgetter
from random import Random
from typing import NamedTuple

from lms.ir.liveness import round_up
from lms.simulate.allocation_trace import Demand
from lms.simulate.bfc_arena import Arena

STEPS = 10
"""Each step leaves its updated variables elsewhere. One plan for a ResNet-50 with momentum finds room here in
155 MiB for one step, in 178 for four, in 196 for ten and in 200 for forty."""

GROWN_STEPS = 4
"""The number of steps after which a region has nearly its final size."""

SHUFFLED_BYTES = 1 << 20
"""Room for the small buffers of an input pipeline: the labels of 4,096 examples that it shuffles."""

LATE_SHARE, LATE_BYTES, LATE_STEPS = 0.1, 1 << 20, 3
"""Of the buffers of at least so many bytes this share is freed late, in each of so many steps. A plan for a
U-Net that ran out of memory on an H100 in its third step finds no room then in half of the rehearsals, and
one for a ResNet-50 that trained there finds it in all, with 0.3 too."""

READY, READY_EVENTS, READY_STEPS = 4, 3, 4
"""An input pipeline holds at most so many batches ready, and makes or hands over so many in a step; plans are
rehearsed so for so many steps. Trainings of a U-Net that found room in all other rehearsals ran out of memory
behind 63 steps and more; here it does so in one of 360 steps."""

POOL_SHARE = 64
"""The room for small buffers is at most this part of the region, and what keeps it apart takes as much."""


def small_pool_bytes(demand: Demand, size: int) -> int:
    """Return the bytes of the pool for a step's small buffers in a region of ``size`` bytes."""
    shuffled = SHUFFLED_BYTES if demand.room_for_batches else 0
    return min(round_up(demand.tape.small_bytes * 5 // 4 + shuffled), size // POOL_SHARE)


def peak_in_pieces(demand: Demand, size: int, steps: int = STEPS, *, pooled: bool = False) -> int | None:
    """Return the most bytes in use, as the allocator counts them: with the unused rest of each chunk.

    In the first step the variables that it will move lie side by side and all else is free; each later one
    finds them where the one before it has left them.

    Args:
        demand: What a step allocates and when.
        size: Bytes of the region, not counting the variables that the step moves.
        steps: How many steps to run.
        pooled: Whether small buffers are first placed in a pool of their own.

    Returns:
        Bytes, not counting what these variables had before the first step; ``None`` when a buffer finds no
        chunk.
    """
    key = size, steps, pooled
    if key not in demand.peaks:
        run = Rehearsal(demand, size, pooled=pooled)
        found = run.run(steps_to_run(demand, steps))
        demand.peaks[key] = run.peak if found else None
    return demand.peaks[key]


def room_in_pieces(demand: Demand, size: int, *, pooled: bool = False) -> int:
    """Return the bytes of a region that all buffers fit in: ``size``, or what the region grows to.

    A region that has grown is run for :data:`GROWN_STEPS` steps: after these it hardly grows any more.
    """
    key = size, pooled
    if key not in demand.rooms:
        run = Rehearsal(demand, size, pooled=pooled)
        steps = steps_to_run(demand, STEPS)
        run.run(min(steps, GROWN_STEPS), grows=True)
        for _ in range(steps - GROWN_STEPS):
            if run.grown:
                break
            run.step(grows=True)
        demand.rooms[key] = run.size
        demand.peaks[size, STEPS, pooled] = None if run.grown else run.peak
    return demand.rooms[key]


def bears_late_frees(demand: Demand, size: int, runs: int) -> bool:
    """Tell whether all buffers find chunks although some others are freed late, by chance.

    An executor frees a buffer when its last reader is launched. Another of its threads may launch the next op
    before that, and then what this op makes lies elsewhere, and with it all that follows.

    Args:
        demand: What a step allocates and when.
        size: Bytes of the region, not counting the variables that the step moves.
        runs: How often to rehearse the steps.
    """
    for seed in range(runs):
        chance = Random(seed)  # noqa: S311 - the same in each process
        run = Rehearsal(demand, size, pooled=True)
        for _ in range(min(steps_to_run(demand, STEPS), LATE_STEPS)):
            if not run.play(_with_late_frees(demand.tape.calls, chance)):
                return False
            run.end_step()
    return True


def bears_batches(demand: Demand, size: int, nbytes: int, ready: int, seed: int) -> bool:
    """Tell whether all buffers find chunks while batches are made and handed over, by the chance of a seed.

    A step's buffers lie where the batches of a moment let them, and so elsewhere in each step.

    Args:
        demand: What a step allocates and when.
        size: Bytes of the region, not counting the variables that the step moves.
        nbytes: Of a batch.
        ready: The most batches that wait for their steps.
        seed: Of the moments at which they come and go.
    """
    key = size, nbytes, ready, seed
    if key not in demand.borne:
        demand.borne[key] = _bears_batches(demand, size, nbytes, ready, seed)
    return demand.borne[key]


def _bears_batches(demand: Demand, size: int, nbytes: int, ready: int, seed: int) -> bool:
    calls = demand.tape.calls
    fills = [(fill.place, fill) for fill in demand.tape.fills]
    chance = Random(seed)  # noqa: S311 - the same in each process
    run = Rehearsal(demand, size, pooled=True)
    free, held = deque(run.add_register() for _ in range(ready)), deque[int]()
    for _ in range(READY_STEPS):
        done = 0
        events = [(chance.randrange(len(calls) + 1), None) for _ in range(READY_EVENTS)]
        for place, fill in sorted([*fills, *events], key=itemgetter(0)):
            if not run.play(calls[done:place]):
                return False
            done = place
            if fill is not None:
                run.take_rest(fill.register, fill.sizes, fill.least)
            elif free and not (held and chance.random() < 1 / 2):
                held.append(free.popleft())
                if not run.play([(held[-1], nbytes)]):
                    return False
            else:
                free.append(held.popleft())
                run.play([(free[-1], 0)])
        if not run.play(calls[done:]):
            return False
        run.end_step()
    return True


def _with_late_frees(calls: Iterable[tuple[int, int]], chance: Random) -> list[tuple[int, int]]:
    """Return the calls of a step with some frees of large buffers behind the next large allocation."""
    changed: list[tuple[int, int]] = []
    late: list[tuple[int, int]] = []
    large: set[int] = set()
    for register, nbytes in calls:
        if not nbytes and register in large and chance.random() < LATE_SHARE:
            late.append((register, nbytes))
            continue
        changed.append((register, nbytes))
        if nbytes >= LATE_BYTES:
            large.add(register)
            changed += late
            late.clear()
    return changed + late


def steps_to_run(demand: Demand, steps: int) -> int:
    """Return ``steps``, or at most one where the step moves no variable and so all steps are alike."""
    return steps if demand.tape.moves else min(steps, 1)


def first_stuck(demand: Demand, size: int, *, pooled: bool) -> "Stuck | None":
    """Return the first buffer of :data:`STEPS` steps that finds no chunk, or ``None`` where each does.

    The arguments are those of :func:`peak_in_pieces`, for a demand without fillers.
    """
    key = size, STEPS, pooled
    if demand.peaks.get(key) is not None:
        return None
    run = Rehearsal(demand, size, pooled=pooled)
    stuck = run.stuck(steps_to_run(demand, STEPS))
    demand.peaks[key] = run.peak if stuck is None else None
    return stuck


class Chunk(NamedTuple):
    """A piece of an arena's memory."""

    offset: int
    nbytes: int
    register: int | None
    """The register for which it was taken in this step; ``None``: it is free, or was taken before."""
    is_free: bool


class Stuck(NamedTuple):
    """The first buffer of a rehearsal that finds no chunk."""

    register: int
    nbytes: int
    chunks: list[Chunk]
    """All memory at that moment, by offset."""


class Rehearsal:
    """Runs steps in an arena, one after the other.

    Args:
        demand: What each step allocates and when.
        size: Bytes of the region, not counting the variables that the step moves.
        pooled: Whether small buffers find room of their own at first.
    """

    def __init__(self, demand: Demand, size: int, *, pooled: bool) -> None:
        self._tape = tape = demand.tape
        self._before = max(sum(tape.variables.values()), demand.resident_bytes or 0)
        self._arena = Arena(size + self._before, grows=demand.resident_bytes is not None)
        self._arena.fill(self._before - sum(tape.variables.values()))
        self._chunks = [self._arena.reserve(nbytes) for nbytes in tape.variables.values()]
        self._chunks += [0] * (tape.registers - len(self._chunks))
        self._sharers: dict[int, int] = {}
        """For each chunk that several variables have how many more than one."""
        self._asked = size
        pool = small_pool_bytes(demand, size) if pooled else 0
        for sizes in ((pool,) if pool else (), demand.room_for_batches):
            if sizes:
                room = self._arena.reserve(sum(sizes))
                self._arena.reserve(sizes[-1])
                self._arena.release(room)

    @property
    def peak(self) -> int:
        """The most bytes so far, less what was in use at first."""
        return self._arena.peak - self._before

    @property
    def chunks(self) -> int:
        """The number of chunks in use."""
        return self._arena.chunks

    @property
    def size(self) -> int:
        """Bytes of the arena, less what was in use at first."""
        return self._arena.size - self._before

    @property
    def grown(self) -> bool:
        """Whether the region is larger than it was at first."""
        return self.size > self._asked

    def run(self, steps: int, *, grows: bool = False) -> bool:
        """Run steps and tell whether every buffer found a chunk.

        Where the region grows, every buffer finds one.
        """
        tape = self._tape
        if tape.fills or tape.shares:
            return all(self.step(grows=grows) for _ in range(steps))
        calls = tape.calls
        done = self._arena.play(
            calls, self._chunks, self._sharers, moves=tape.moves, steps=steps, grows=grows
        )
        return done == len(calls)

    def step(self, *, grows: bool = False) -> bool:
        """Run one step; see :meth:`run`."""
        tape, done = self._tape, 0
        for place, register, sizes, least in tape.fills:
            if not self.play(tape.calls[done:place], grows=grows):
                return False
            self.take_rest(register, sizes, least)
            done = place
        if not self.play(tape.calls[done:] if done else tape.calls, grows=grows):
            return False
        self.end_step()
        return True

    def play(self, calls: Sequence[tuple[int, int]], *, grows: bool = False) -> bool:
        """Do what some calls of a step ask for, and tell whether every buffer found a chunk."""
        return self._arena.play(calls, self._chunks, self._sharers, grows=grows) == len(calls)

    def stuck(self, steps: int) -> Stuck | None:
        """Run steps without fillers, and return the first buffer that finds no chunk; ``None``: each does."""
        tape = self._tape
        for _ in range(steps):
            done = self._arena.play(tape.calls, self._chunks, self._sharers)
            if done < len(tape.calls):
                register, nbytes = tape.calls[done]
                return Stuck(register, abs(nbytes), self._chunks_behind(done))
            self.end_step()
        return None

    def _chunks_behind(self, done: int) -> list[Chunk]:
        """Return all memory once ``done`` calls of a step are played."""
        taken_for = {
            self._chunks[register]: register for register, nbytes in self._tape.calls[:done] if nbytes
        }
        held = (
            Chunk(offset, nbytes, taken_for.get(offset), is_free=False)
            for offset, nbytes in self._arena.layout
        )
        free = (Chunk(offset, nbytes, None, is_free=True) for offset, nbytes in self._arena.free)
        return sorted((*held, *free))

    def take_rest(self, register: int, sizes: Sequence[int], least: int) -> int:
        """Let a filler take memory, as :meth:`Arena.take_rest` does; return its bytes."""
        self._chunks[register], nbytes = self._arena.take_rest(sizes, least)
        return nbytes

    def add_register(self) -> int:
        """Return a register for what is in no call of the step."""
        self._chunks.append(0)
        return len(self._chunks) - 1

    def end_step(self) -> None:
        """Let the variables have the chunks that the step has left them."""
        chunks = self._chunks
        for register, latest in self._tape.moves:
            chunks[register] = chunks[latest]
        if self._tape.shares:
            holders = Counter(chunks[: len(self._tape.variables)])
            self._sharers = {chunk: count - 1 for chunk, count in holders.items() if count > 1}
