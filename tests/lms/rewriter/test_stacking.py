"""The lists that loops keep for their backward pass are swapped, with the same results."""

from typing import Any

import pytest
from child_job import run_job

pytestmark = pytest.mark.tensorflow

LOOPS = ("layers", "ranged", "halves", "early", "growing", "empty", "sliced", "nested", "conditional")


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    pytest.importorskip("tensorflow")
    return run_job("loop_lists_job.py")


@pytest.mark.parametrize("way", [*LOOPS, "fewer rows", "shorter", "repeated", "keras", "budget"])
def test_the_results_are_the_same(way: str, seen: dict[str, Any]) -> None:
    assert seen[way]["on"] == seen[way]["off"]


@pytest.mark.parametrize("way", ["layers", "halves", "fewer rows", "shorter", "repeated", "keras", "budget"])
def test_lists_are_stacked_and_swapped(way: str, seen: dict[str, Any]) -> None:
    assert seen[way]["stacked"] > 3
    assert not any("in no plan" in one for one in seen[way]["told"])


@pytest.mark.parametrize("way", ["early", "growing"])
def test_a_list_of_unknown_size_stays_and_is_told(way: str, seen: dict[str, Any]) -> None:
    assert not seen[way]["stacked"]
    assert any("is in no plan" in one for one in seen[way]["told"])


def test_recurrent_layers_need_a_part_of_the_memory(seen: dict[str, Any]) -> None:
    assert seen["keras"]["on mib"] < 0.55 * seen["keras"]["off mib"]
    assert seen["budget"]["on mib"] < 0.85 * seen["budget"]["off mib"]


@pytest.mark.parametrize("way", ["keras", "budget"])
def test_the_peak_is_as_planned(way: str, seen: dict[str, Any]) -> None:
    assert abs(seen[way]["error"]) < 0.3


def test_a_forecast_knows_that_lists_are_swapped(seen: dict[str, Any]) -> None:
    batches = seen["forecast"]
    assert batches["hybrid"] >= batches["swap"] > 1.2 * batches["off"]
