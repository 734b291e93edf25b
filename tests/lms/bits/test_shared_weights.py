"""Weights that a step uses several times: TensorFlow adds their gradients in the same order with LMS."""

from typing import Any

import pytest
from child_job import run_job

pytestmark = pytest.mark.tensorflow

SEEDS = 6


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return run_job("shared_weights_job.py", "8", str(SEEDS))


@pytest.mark.parametrize("way", ["swap", "recompute"])
def test_weights_that_branches_and_loops_share_train_to_the_same_bits(
    found: dict[str, Any], way: str
) -> None:
    assert found["chance"] == []
    differ, edited = found[way]
    assert differ == []
    assert edited >= SEEDS - 1
