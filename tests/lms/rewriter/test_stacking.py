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


@pytest.fixture
def of_keras(seen: dict[str, Any]) -> dict[str, Any]:
    """What came of Keras's own layers."""
    if seen["is_legacy"]:
        pytest.skip(
            "the recurrent layers of Keras 2 run their loops within functions, into which no plan looks"
        )
    return seen


@pytest.mark.parametrize("way", [*LOOPS, "fewer rows", "shorter", "repeated", "keras", "budget"])
def test_the_results_are_the_same(way: str, seen: dict[str, Any]) -> None:
    assert seen[way]["on"] == seen[way]["off"]


@pytest.mark.parametrize("way", ["layers", "halves", "fewer rows", "shorter", "repeated"])
def test_lists_are_stacked_and_swapped(way: str, seen: dict[str, Any]) -> None:
    assert seen[way]["stacked"] > 3
    assert not any("in no plan" in one for one in seen[way]["told"])


@pytest.mark.parametrize("way", ["keras", "budget"])
def test_lists_of_keras_are_stacked_and_swapped(way: str, of_keras: dict[str, Any]) -> None:
    assert of_keras[way]["stacked"] > 3
    assert not any("in no plan" in one for one in of_keras[way]["told"])


@pytest.mark.parametrize("way", ["early", "growing"])
def test_a_list_of_unknown_size_stays_and_is_told(way: str, seen: dict[str, Any]) -> None:
    assert not seen[way]["stacked"]
    assert any("is in no plan" in one for one in seen[way]["told"])


def test_recurrent_layers_need_a_part_of_the_memory(of_keras: dict[str, Any]) -> None:
    assert of_keras["keras"]["on mib"] < 0.55 * of_keras["keras"]["off mib"]
    assert of_keras["budget"]["on mib"] < 0.85 * of_keras["budget"]["off mib"]


@pytest.mark.parametrize("way", ["keras", "budget"])
def test_the_peak_is_as_planned(way: str, of_keras: dict[str, Any]) -> None:
    assert abs(of_keras[way]["error"]) < 0.3


def test_a_forecast_knows_that_lists_are_swapped(of_keras: dict[str, Any]) -> None:
    batches = of_keras["forecast"]
    assert batches["hybrid"] >= batches["swap"] > 1.2 * batches["off"]
