"""Loops that keep lists for their backward pass are told, and what a plan lacks for them is explained."""

from typing import Any

import pytest
from child_job import run_job

pytestmark = pytest.mark.tensorflow


@pytest.fixture(scope="module", params=["0", "1"], ids=["keras", "legacy keras"])
def seen(request: pytest.FixtureRequest) -> dict[str, Any]:
    pytest.importorskip("tensorflow")
    return run_job("loops_job.py", TF_USE_LEGACY_KERAS=request.param)


def test_a_loop_of_unknown_turns_is_told_once_at_the_line_of_the_user(seen: dict[str, Any]) -> None:
    (told,) = seen["unknown"]["told"]
    assert "keeps for the backward pass is in no plan" in told
    assert "unroll=True" in told
    assert seen["unknown"]["here"] == [True]


def test_the_report_does_not_blame_the_allocator(seen: dict[str, Any]) -> None:
    assert seen["unknown"]["error"] > 0.1
    assert "what loops keep for their backward pass is in no plan" in seen["unknown"]["report"]
    assert "twice its size" not in seen["unknown"]["report"]


def test_a_loop_of_known_turns_is_planned(seen: dict[str, Any]) -> None:
    """The layers of legacy Keras run theirs within a function, into which no plan looks."""
    if seen["keras"] == "legacy":
        assert len(seen["loop"]["told"]) == 1
        return
    assert not seen["loop"]["told"] and "in no plan" not in seen["loop"]["report"]


def test_an_unrolled_layer_is_swapped_and_nothing_is_told(seen: dict[str, Any]) -> None:
    assert seen["unrolled"]["told"] == []
    assert seen["unrolled"]["tensors"] > 10


def test_many_lengths_are_one_warning_a_remedy(seen: dict[str, Any]) -> None:
    """Their traces, and the bodies of their loops, have sizes that are open each time."""
    loops, lengths = seen["many lengths"]
    assert "what 2 loops" in loops and "unroll=True" in loops
    assert "32x10x64" in lengths and "again for 32x20x64" in lengths and "begin with the longest" in lengths


def test_a_step_in_a_loop_over_a_dataset_is_planned_for_its_batches(seen: dict[str, Any]) -> None:
    """Nobody gives their size but the dataset, which is an argument of the function; larger ones are seen."""
    (tensors, first), (_, larger), *_ = seen["dataset"]["bodies"]
    assert tensors > 5 and larger > 1.9 * first
    assert seen["dataset"]["traces"] == 1
    (told,) = seen["dataset"]["told"]
    assert "was planned for batches of 256, and is again for 512" in told
