"""The simulated pool at its fullest moment: which chunk lies where, and the holes between them."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from lms.simulate.allocation_trace import Demand
from lms.simulate.bfc_arena import Arena
from lms.simulate.rehearsal import STEPS, Rehearsal, steps_to_run


class Chunk(NamedTuple):
    """One chunk in use."""

    offset: int
    nbytes: int
    tensor: int | None
    """The buffer that it was allocated for; ``None`` for a variable, and for what keeps a pool apart."""


@dataclass(frozen=True)
class PoolMap:
    """One moment of a region of device memory. What is in no chunk is free."""

    size: int
    """Bytes of the region."""
    used: int
    chunks: tuple[Chunk, ...]
    """By offset."""

    @property
    def holes(self) -> tuple[tuple[int, int], ...]:
        """Offset and bytes of each free stretch, by offset."""
        begins = [0, *(chunk.offset + chunk.nbytes for chunk in self.chunks)]
        ends = [*(chunk.offset for chunk in self.chunks), self.size]
        return tuple((begin, end - begin) for begin, end in zip(begins, ends, strict=True) if end > begin)


class _Noted(list[int]):
    """The chunk of each register; notes who has which chunk, and stops to look at a chosen moment."""

    def __init__(self, chunks: list[int], arena: Arena, moment: int | None) -> None:
        super().__init__(chunks)
        self._arena, self._moment = arena, moment
        self._owner = {offset: register for register, offset in enumerate(chunks) if arena.holds(offset)}
        self._seen = 0
        self.fullest = 0
        """When the most bytes were in use."""
        self.found: tuple[list[tuple[int, int]], dict[int, int], int] | None = None

    def __setitem__(self, register: Any, offset: Any) -> None:
        super().__setitem__(register, offset)
        self._owner[offset] = register
        self._seen += 1
        if self._arena.used == self._arena.peak and self._moment is None:
            self.fullest = self._seen
        if self._seen == self._moment:
            self.found = self._arena.layout, dict(self._owner), self._arena.used


class _NotedRehearsal(Rehearsal):
    """A rehearsal whose chunks are noted."""

    def __init__(self, demand: Demand, size: int, *, pooled: bool, moment: int | None = None) -> None:
        super().__init__(demand, size, pooled=pooled)
        self._chunks = self.noted = _Noted(self._chunks, self._arena, moment)


def map_pool(demand: Demand, size: int, *, pooled: bool) -> PoolMap:
    """Return the pool at the moment at which the most bytes are in use, in the steps of a rehearsal.

    Args:
        demand: What a step allocates and when.
        size: Bytes of the region, not counting the variables that the step moves; it grows where they do not
            suffice.
        pooled: Whether small buffers are first placed in a pool of their own.
    """
    moment = _rehearse(_NotedRehearsal(demand, size, pooled=pooled), demand).noted.fullest
    run = _rehearse(_NotedRehearsal(demand, size, pooled=pooled, moment=moment), demand)
    layout, owner, used = run.noted.found or ([], {}, 0)
    tensors = demand.tape.tensors
    chunks = tuple(Chunk(offset, nbytes, tensors.get(owner.get(offset, -1))) for offset, nbytes in layout)
    whole = max(
        [run.size + sum(demand.tape.variables.values()), *(one.offset + one.nbytes for one in chunks)]
    )
    return PoolMap(whole, used, chunks)


def _rehearse(run: _NotedRehearsal, demand: Demand) -> _NotedRehearsal:
    for _ in range(steps_to_run(demand, STEPS)):
        run.step(grows=True)
    return run
