"""Batches that grow beyond what a step was planned for."""

import pytest
from child_job import run_job

pytestmark = pytest.mark.tensorflow


@pytest.mark.parametrize("legacy_keras", ["0", "1"])
def test_a_step_is_planned_again_for_larger_batches(legacy_keras: str) -> None:
    pytest.importorskip("tensorflow")
    seen = run_job("growth_job.py", TF_USE_LEGACY_KERAS=legacy_keras)
    four, eight, large = seen["peaks"]
    assert eight > 1.8 * four and large > 3.5 * eight, "each planned for its own size"
    said = [text.partition("batches of ")[2] for text in seen["said"]]
    assert said == ["4, and is again for 8", "8, and is again for 32"]
    assert seen["traces"] == seen["plain traces"] > 0
    assert not seen["left"], "a model is kept after its training"


@pytest.mark.parametrize(("kind", "legacy_keras"), [("keras", "0"), ("keras", "1"), ("loop", "0")])
def test_open_lengths_are_planned_for_the_first_batch_and_again_for_a_longer_one(
    kind: str, legacy_keras: str
) -> None:
    pytest.importorskip("tensorflow")
    seen = run_job("lengths_job.py", kind, TF_USE_LEGACY_KERAS=legacy_keras)
    assert seen["same"], "other losses, traces or weights than without LMS"
    assert min(seen["tensors"]) > 2, "what has an open length is swapped"
    first, *_, longest = seen["needed"]
    assert longest > 1.6 * first > 0, "and in the planned peaks"
    (said,) = seen["said"]
    assert "and 32x20, and is again for 32x41" in said
