"""Run the loop of the simulated allocator compiled, where it was built with the package."""

import ctypes
import functools
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from lms.native.prebuilt import find_prebuilt

SOURCE = Path(__file__).resolve().with_name("arena.c")
VERSION = 2
"""Must be what ``lms_arena_version`` gives; raise both whenever the call changes."""

Pairs = Sequence[tuple[int, int]]


class _Arena(ctypes.Structure):
    """``LmsArena`` of ``arena.c``."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("used", "peak", "steps", "call")),
        *((name, ctypes.c_int64) for name in ("free_count", "taken_count", "largest_waste")),
        *((name, ctypes.c_void_p) for name in ("free", "taken")),
    )


class Memory(NamedTuple):
    """Holds the state of an allocator."""

    free: Pairs
    """Bytes and offset of each free chunk, ascending."""
    taken: Mapping[int, int]
    """Bytes of each chunk in use, by its offset."""
    used: int
    peak: int


class Stop(NamedTuple):
    """Tells where a play of calls has ended."""

    memory: Memory
    steps: int
    """The steps that are left; among them the one in which a buffer found no chunk."""
    call: int
    """The call that found none."""


Play = Callable[[Memory, "array[int]", "array[int]", list[int], int, int, int], Stop | None]
"""``(memory, calls, moves, chunks, steps, call to begin with, largest waste) -> where it has ended``.

Calls and moves are pairs as :func:`flat` lists them.

It changes ``chunks`` in place. ``None``: it cannot tell, and nothing has changed.
"""


@functools.cache
def compiled_play() -> Play | None:
    """Return the compiled loop, or ``None`` where it was not built with the package or cannot be used."""
    for path in find_prebuilt(SOURCE):
        try:
            library = ctypes.CDLL(str(path))
            if library.lms_arena_version() == VERSION:
                return functools.partial(_play, library.lms_arena_play, library.lms_arena_free)
        except (OSError, AttributeError):
            continue
    return None


def _play(
    run: Callable[..., int],
    free: Callable[..., object],
    memory: Memory,
    calls: "array[int]",
    moves: "array[int]",
    chunks: list[int],
    steps: int,
    call: int,
    largest_waste: int,
) -> Stop | None:
    given, taken, offsets = flat(memory.free), flat(memory.taken.items()), array("q", chunks)
    arena = _Arena(
        *(memory.used, memory.peak, steps, call, len(memory.free), len(memory.taken), largest_waste),
        *(_address(given), _address(taken)),
    )
    listed = (
        *(_address(calls), len(calls) // 2, _address(moves), len(moves) // 2),
        *(_address(offsets), len(chunks)),
    )
    if not run(ctypes.byref(arena), *map(ctypes.c_int64, listed)):
        return None
    try:
        left = _pairs(arena.free, arena.free_count), dict(_pairs(arena.taken, arena.taken_count))
    finally:
        free(ctypes.byref(arena))
    chunks[:] = offsets
    return Stop(Memory(*left, arena.used, arena.peak), arena.steps, arena.call)


def flat(pairs: Iterable[tuple[int, int]]) -> "array[int]":
    """Return the numbers of all pairs, one after the other."""
    return array("q", list(chain.from_iterable(pairs)))


def _address(numbers: "array[int]") -> int:
    return numbers.buffer_info()[0]


def _pairs(address: int, count: int) -> list[tuple[int, int]]:
    listed = array("q")
    listed.frombytes(ctypes.string_at(address, 16 * count))
    numbers = iter(listed)
    return list(zip(numbers, numbers, strict=True))
