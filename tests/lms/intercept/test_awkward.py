"""Steps that wait, draw or change things beside their variables run as they do without LMS."""

from typing import Any

import pytest
from child_job import run_job

pytestmark = pytest.mark.tensorflow


def run(way: str) -> dict[str, Any]:
    return run_job("awkward_job.py", way)


def test_a_step_gets_what_it_puts_itself_wherever_it_waits_for_it() -> None:
    for found in run("looking").values():
        assert found["ours"] == found["plain"]
        assert sum(found["swapped"]) >= 5


@pytest.mark.parametrize(
    "way", ["variant", "frames", "keyword", "newton", "partial_run", "queue", "read_anew"]
)
def test_nothing_changes(way: str) -> None:
    found = run(way)
    assert found["ours"] == found["plain"]
    assert found["left"] == []


@pytest.mark.parametrize("way", ["seeded", "two_threads"])
def test_a_second_plan_draws_on(way: str) -> None:
    found = run(way)
    assert found["ours"] == found["plain"] and len(found["swapped"]) == (2 if way == "two_threads" else 1)


@pytest.mark.parametrize("way", ["captured", "captured_beside", "relay", "two_fed", "two_fed_flag"])
def test_a_step_whose_sizes_come_from_elsewhere_is_planned(way: str) -> None:
    found = run(way)
    assert found["ours"] == found["plain"]
    assert sum(found["swapped"]) >= 5 and found["peak"]


def test_what_another_thread_counts_is_not_lost() -> None:
    found = run("shared")
    (said,) = found["said"]
    assert "something else ran beside it" in said and found["count"] == 100


def test_what_lasts_is_not_done_twice() -> None:
    found = run("effects")
    assert found["accumulator"] in (["failed", 0], ["failed", 1])
    assert found["table"] in (["failed", 0], ["failed", 1])
    assert found["element"][0] == "failed", "another batch would be taken"
    assert found["reader"] == ["failed", 2.0], "the first line was read"
    assert found["count"][0] == found["slice"][0] == "failed"


def test_a_step_is_planned_again_where_more_lies_beside_it() -> None:
    """More lay on the device than a plan left free: a later step, not tried again, ran out of memory."""
    for found in run("beside").values():
        assert found["beside"] == found["alone"]
        (warning,) = found["warnings"]
        assert "on CPU:0 before it, and is again: there are" in warning
