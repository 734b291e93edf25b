"""Batches that a distribution strategy divides among devices, not all of one size."""

import pytest
from child_job import run_job

pytestmark = pytest.mark.tensorflow


@pytest.mark.parametrize(
    ("way", "legacy_keras"), [("fit", "0"), ("fit", "1"), ("dataset", "0"), ("iterator", "0")]
)
def test_divided_batches_of_which_the_last_is_smaller_are_planned_for(way: str, legacy_keras: str) -> None:
    """The devices for which no batch is left get an empty one: that decides no size."""
    pytest.importorskip("tensorflow")
    seen = run_job("divided_job.py", way, TF_USE_LEGACY_KERAS=legacy_keras)
    assert seen["same"]
    assert all(tensors > 4 and known for tensors, known in seen["plans"])
    assert seen["plans"]
    assert seen["size"] == 8, "of batches that are not divided"
