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
