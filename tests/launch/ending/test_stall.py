"""Who is named when a job stands still."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from launch.ending.stall import StallWatch, name_culprits
from launch.system.process_load import Load


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def watch(loads: list[Mapping[int, Load]], arrived: frozenset[int] = frozenset()) -> tuple[list[str], Clock]:
    """What is said of three ranks when each look finds the next of these loads."""
    clock = Clock()
    stall, said = StallWatch(60, clock), []
    for load in loads:
        assert stall.due is not None
        clock.now = stall.due
        found = stall.look(lambda load=load: at(clock, load), {0, 1, 2}, arrived)  # type: ignore[misc]
        said += [found.line] if found else []
    return said, clock


def at(clock: Clock, loads: Mapping[int, Load]) -> dict[int, Load]:
    """The same loads, looked at now."""
    return {rank: replace(load, at_s=clock.now) for rank, load in loads.items()}


def loads(*cpu_s: float, stopped: int | None = None) -> dict[int, Load]:
    return {rank: Load(rank == stopped, seconds) for rank, seconds in enumerate(cpu_s)}


def test_quiet_ranks_that_compute_are_left_alone() -> None:
    assert watch([loads(5, 5, 5), loads(35, 30, 20), loads(95, 80, 50)])[0] == []


def test_what_was_told_once_says_nothing_of_the_time_since() -> None:
    clock = Clock()
    stall = StallWatch(8, clock)
    told = at(clock, loads(5, 5, 5))
    for _ in range(4):
        assert stall.due is not None
        clock.now = stall.due
        assert stall.look(lambda: told, {0, 1, 2}, frozenset()) is None


def test_ranks_that_compute_for_long_are_left_alone() -> None:
    halves = [loads(*[30.0 * max(0, 2 * look - 1)] * 3) for look in range(20)]
    assert watch(halves)[0] == []


def test_a_rank_that_computes_while_others_wait_is_no_sure_stall() -> None:
    clock = Clock()
    stall, found = StallWatch(60, clock), []
    for load in [loads(5, 5), loads(35, 5), loads(95, 5), loads(96, 6)]:
        assert stall.due is not None
        clock.now = stall.due
        found.append(stall.look(lambda load=load: at(clock, load), {0, 1}, set()))  # type: ignore[misc]
    assert [one and one.is_sure for one in found] == [None, False, None, True]
    assert stall.due is None


@pytest.mark.parametrize(
    ("later", "said"),
    [
        (loads(6, 35, 5), "ranks 0,2 wait, rank 1 computes"),
        (loads(5, 6, 5), "no rank uses the CPU; ranks 0-2 wait for something"),
        (loads(35, 5, 35, stopped=1), "rank 1 is stopped (SIGSTOP)"),
    ],
)
def test_who_waits_for_whom(later: Mapping[int, Load], said: str) -> None:
    lines, clock = watch([loads(5, 5, 5), later])
    assert lines == [f"no output for 60 s: {said}"]
    assert clock.now == 160


def test_those_who_have_not_come_are_named() -> None:
    lines, _ = watch([loads(5, 5, 5), loads(6, 6, 6)], frozenset({0, 2}))
    assert lines == ["no output for 60 s: rank 1 has not come to hvd.init(), where ranks 0,2 wait"]
    both = name_culprits({0, 1, 2}, loads(0, 0, 0, stopped=2), {0})
    assert both == ("rank 2 is stopped (SIGSTOP); ranks 1-2 have not come to hvd.init(), where rank 0 waits")


def test_it_is_told_once_and_again_after_something_has_come() -> None:
    clock = Clock()
    stall = StallWatch(10, clock)
    for _ in range(2):
        clock.now += 5
        assert stall.look(lambda: at(clock, loads(1)), {0}, set()) is None
        clock.now += 5
        assert stall.look(lambda: at(clock, loads(1)), {0}, set()) is not None
        assert stall.due is None
        stall.progress()
    assert StallWatch(0, clock).due is None
