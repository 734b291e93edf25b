"""How a job ends, in any order of events: a part of the schedules that ``schedules.py`` knows."""

import pytest
from schedules import Schedule, live


@pytest.mark.parametrize("first", [0, 50_000])
def test_every_schedule_ends_with_nothing_left(first: int) -> None:
    for seed in range(first, first + 1500):
        live(seed)


def test_a_schedule_replays_from_its_seed() -> None:
    for seed in range(50):
        ends = []
        for _ in range(2):
            schedule = Schedule(seed)
            schedule.run()
            ends.append((schedule.now, schedule.job.verdict, dict(schedule.job.statuses)))
        assert ends[0] == ends[1]


def test_a_launcher_that_stays_is_ended_although_a_rank_is_stuck_in_the_kernel() -> None:
    live(110)
