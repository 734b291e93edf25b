"""Where an epoch ends: a call of the step without a batch would still run what needs none."""

import pytest
from child_job import run_job

pytestmark = pytest.mark.tensorflow


@pytest.mark.parametrize("legacy_keras", ["0", "1"])
def test_weight_decay_over_epochs_of_known_length_gives_the_same_bits(legacy_keras: str) -> None:
    pytest.importorskip("tensorflow")
    seen = run_job("epochs_job.py", TF_USE_LEGACY_KERAS=legacy_keras)
    assert seen["on"] == seen["off"] and seen["swapped"] > 2
