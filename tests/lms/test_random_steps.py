"""Random graphs run after an edit, and train to the values that they train to without."""

import math

import pytest
from child_job import run_job

pytestmark = pytest.mark.tensorflow


def test_random_graphs_train_to_the_same_values() -> None:
    pytest.importorskip("tensorflow")
    seen = run_job("random_steps_job.py", "16")
    assert len(seen) == 16
    assert all(math.isfinite(apart) and apart < 1e-5 for apart, _ in seen.values()), seen
    assert all(swapped > 1 for _, swapped in seen.values()), seen
