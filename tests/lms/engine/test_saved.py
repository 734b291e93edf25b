"""What is saved from a training under LMS is what is saved without: no op of ours is in it."""

from typing import Any

import pytest
from child_job import run_job

pytestmark = pytest.mark.tensorflow


@pytest.fixture(scope="module", params=["keras3", "tf_keras"])
def seen(request: pytest.FixtureRequest) -> dict[str, Any]:
    pytest.importorskip("tensorflow")
    if request.param == "tf_keras":
        pytest.importorskip("tf_keras")
    found = run_job(
        "saved_job.py", request.param, TF_USE_LEGACY_KERAS="1" if request.param == "tf_keras" else "0"
    )
    assert found["edited"] == 1, "the training that is saved was under LMS, planned once"
    return {**found, "legacy": request.param == "tf_keras"}


def test_a_saved_model_loads_with_its_weights_and_trains_on(seen: dict[str, Any]) -> None:
    assert seen[".keras"] and seen[".h5"] and seen["weights"]
    assert seen["trained on"]


def test_exports_hold_no_swaps(seen: dict[str, Any]) -> None:
    assert seen["models"] == (2 if seen["legacy"] else 1)
    assert seen["with swaps"] == []
    assert seen["served"] < 1e-5
