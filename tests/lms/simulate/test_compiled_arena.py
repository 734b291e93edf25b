"""The compiled loop of the simulated allocator does what the one in Python does, and may be missing."""

import shutil
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lms.ir.liveness import Residency
from lms.native import arena as native
from lms.simulate import bfc_arena
from lms.simulate.allocation_trace import Demand, Update
from lms.simulate.bfc_arena import Arena

K = 4096
POINTS = st.integers(0, 14)


pytestmark = pytest.mark.skipif(
    native.compiled_play() is None, reason="no compiled loop of this version: no C compiler, or no make setup"
)


@st.composite
def steps_with_variables(draw: st.DrawFn) -> Demand:
    """Draw a step with buffers of many sizes, and variables that each get a chunk of their own."""
    lasting = st.tuples(POINTS, st.integers(1, 12), st.integers(0, 8))
    stays = [
        Residency(number, size * K, first, first + long)
        for number, (first, size, long) in enumerate(draw(st.lists(lasting, max_size=24)))
    ]
    updates = [
        Update(point, 100 + number, size * K, None, point + long)
        for number, (point, size, long) in enumerate(draw(st.lists(lasting, max_size=6)))
    ]
    return Demand(tuple(stays), tuple(updates))


def played(demand: Demand, size: int, steps: int, *, grows: bool, regions: bool) -> Any:
    """Play steps; return all that can be seen of the allocator then."""
    tape = demand.tape
    arena = Arena(size, grows=regions)
    chunks = [arena.grow_for(nbytes) for nbytes in tape.variables.values()]
    chunks += [0] * (tape.registers - len(chunks))
    done = arena.play(tape.calls, chunks, {}, moves=tape.moves, steps=steps, grows=grows)
    seen = (done, arena.used, arena.peak, arena.size, arena.layout, sorted(arena.free), chunks)
    more = [arena.allocate(nbytes) for nbytes in (K, 5 * K, size)]
    for offset, _ in arena.layout:
        arena.release(offset)
    return *seen, more, arena.free


def in_both_ways(demand: Demand, size: int, steps: int, **how: bool) -> tuple[Any, Any]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(bfc_arena, "FEWEST_COMPILED", 0)
        compiled = played(demand, size, steps, **how)
        patched.setattr(bfc_arena, "compiled_play", lambda: None)
        return compiled, played(demand, size, steps, **how)


@settings(max_examples=400, deadline=None)
@given(steps_with_variables(), st.integers(20, 90), st.integers(1, 5), st.booleans(), st.booleans())
def test_both_loops_leave_the_same(demand: Demand, size: int, steps: int, grows: bool, regions: bool) -> None:
    compiled, plain = in_both_ways(demand, size * K, steps, grows=grows, regions=regions)
    assert compiled == plain


@settings(max_examples=20, deadline=None)
@given(steps_with_variables(), st.booleans())
def test_both_make_the_regions_of_a_pool_that_grows(demand: Demand, grows: bool) -> None:
    larger = tuple(stay._replace(nbytes=stay.nbytes * 300) for stay in demand.stays)
    demand = Demand(larger, demand.updates)
    compiled, plain = in_both_ways(demand, 40 << 20, 3, grows=grows, regions=True)
    assert compiled == plain


def test_the_largest_waste_is_split_off_by_both() -> None:
    demand = Demand((Residency(0, bfc_arena.LARGEST_WASTE_BYTES, 0, 0), Residency(1, K, 1, 1)), ())
    for more in (-K, 0, K):
        size = 2 * bfc_arena.LARGEST_WASTE_BYTES + more
        compiled, plain = in_both_ways(demand, size, 2, grows=False, regions=False)
        assert compiled == plain


def test_steps_that_keep_what_they_take_go_on_in_python() -> None:
    """No step does; the compiled loop has room for those that free what they take alone."""
    arena, chunks = Arena(1 << 20), [0, 0]
    calls = [(0, K), (1, K), (1, 0)] * 200
    assert arena.play(calls, chunks, {}, steps=2) < len(calls)
    assert arena.chunks == (1 << 20) // K


def test_a_register_that_is_not_there_is_an_error_in_both() -> None:
    for calls, moves in (([(5, K)], []), ([(5, 0)], []), ([(0, K), (0, 0)], [(0, 5)]), ([(0, K)], [(5, 0)])):
        with pytest.raises(IndexError):
            Arena(1 << 30).play(calls * 600, [0], {}, moves=moves)


def test_memory_that_grows_with_each_buffer_is_played_in_a_few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """To begin the compiled loop again takes a copy of all calls: 48,000 took 11.5 s in place of 0.07."""
    counted: list[int] = []
    play = native.compiled_play()
    assert play is not None

    def counting(*args: Any) -> Any:
        counted.append(1)
        return play(*args)

    monkeypatch.setattr(bfc_arena, "compiled_play", lambda: counting)
    calls = [(register, K) for register in range(600)] + [(register, 0) for register in range(600)]
    arena = Arena(10 * K)
    assert arena.play(calls, [0] * 600, {}, steps=3, grows=True) == len(calls)
    assert arena.size == 600 * K and len(counted) <= 3


def test_without_a_file_that_fits_there_is_no_compiled_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = native.compiled_play.__wrapped__
    with monkeypatch.context() as patched:
        patched.setattr(native, "VERSION", native.VERSION + 1)
        assert find() is None
    monkeypatch.setattr(native, "SOURCE", tmp_path / "arena.c")
    assert find() is None
    for suffix in EXTENSION_SUFFIXES:
        (tmp_path / f"_arena{suffix}").write_bytes(b"no library")
    assert find() is None
    (tmp_path / "_arena.abi3.so").unlink()
    shutil.copy(Path(native.__file__).with_name("_arena.abi3.so"), tmp_path / "_arena.abi3.so")
    assert find() is not None, "beside another that cannot be loaded"
