"""LMS that IBM's callback has switched on is on for its training alone, however that ends."""

from typing import Any

import pytest
from child_job import run_job

pytestmark = pytest.mark.tensorflow

OVER = "the training that LMS was on for is over"
PLANS = "each step is planned before it runs, policy"


@pytest.fixture(scope="module", params=["0", "1"], ids=["keras", "legacy keras"])
def seen(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Each state: whether LMS is on, why, graphs looked at, graphs edited."""
    pytest.importorskip("tensorflow")
    return run_job("guests_job.py", TF_USE_LEGACY_KERAS=request.param)


def test_a_training_that_failed_leaves_no_lms_to_other_models(seen: dict[str, Any]) -> None:
    """Keras tells no callback of it; the next function that is called finds it over."""
    assert seen["failed"] == ["ArithmeticError", True, f"{PLANS} threshold", 1, 1]
    assert seen["another after it"] == [False, OVER, 1, 1]
    assert seen["warnings"] == [], "XLA is the other model's own affair"


def test_what_was_done_is_told_after_the_training(seen: dict[str, Any]) -> None:
    assert seen["the next with it"] == seen["another after that"] == [False, OVER, 2, 2]


def test_a_step_that_no_model_calls_is_another_one_too(seen: dict[str, Any]) -> None:
    assert seen["a step of its own"] == [False, OVER, 3, 3]


def test_who_enables_lms_afterwards_gets_what_was_asked_for(seen: dict[str, Any]) -> None:
    assert seen["enabled"] == [True, f"{PLANS} auto", 0, 0]


def test_a_job_that_has_enabled_lms_keeps_it(seen: dict[str, Any]) -> None:
    """Also where a callback had kept it off for its own model, and failed."""
    by_job = f"{PLANS} all"
    assert seen["kept off"] == [True, by_job, 1, 0]
    assert seen["another in the job"] == [True, by_job, 2, 1]
    on, why, *graphs = seen["after a failure in the job"]
    assert on and "policy threshold" in why and graphs == [2, 2]


def test_the_next_training_of_a_model_is_planned_for_its_own_batches(seen: dict[str, Any]) -> None:
    """Keras tells it before its callbacks, when LMS is still at rest."""
    smaller, larger = seen["larger batches"]
    assert larger > smaller > 0


def test_a_model_that_was_trained_without_it_before_is_planned_for_its_batches(seen: dict[str, Any]) -> None:
    """Keras has told their size when nobody listened, and its step is traced for any size by then."""
    (peak,) = seen["trained without it before"]
    assert peak > 0


def test_a_loop_of_the_script_has_lms_whoever_made_its_callbacks(seen: dict[str, Any]) -> None:
    on, _, *graphs = seen["a loop of its own"]
    assert on and graphs == [1, 1]
    assert seen["behind it"] == [False, OVER, 1, 1]
