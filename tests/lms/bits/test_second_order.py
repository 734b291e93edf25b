"""A tape in a tape ends in the same bits."""

import pytest
from child_job import run_job

pytestmark = pytest.mark.tensorflow


def test_second_order_gradients_end_in_the_same_bits() -> None:
    pytest.importorskip("tensorflow")
    seen = run_job("second_order_job.py")
    assert len(seen) == 3
    for step, (off, on, tensors) in seen.items():
        assert on == off and tensors > 10, step
