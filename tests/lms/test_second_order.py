"""A tape in a tape: the same bits, but where TensorFlow's own sum depends on the order of the ops."""

import numpy as np
import pytest
from child_job import run_job

pytestmark = pytest.mark.tensorflow


def test_second_order_gradients() -> None:
    pytest.importorskip("tensorflow")
    seen = run_job("second_order_job.py")
    assert all(tensors > 10 for _, _, tensors in seen.values())
    for step in ("hessian_product", "after_a_step"):
        off, on, _ = seen[step]
        assert on == off, step
    off, on, _ = (
        np.frombuffer(bytes.fromhex(text), np.float32) if isinstance(text, str) else text
        for text in seen["gradient_penalty"]
    )
    np.testing.assert_allclose(on, off, atol=1e-6)


def test_sums_in_a_fixed_order_are_the_same_to_the_bit() -> None:
    """What differs in a gradient penalty is AddN's choice of the input to start with, and nothing else."""
    pytest.importorskip("tensorflow")
    for step, (off, on, tensors) in run_job("second_order_job.py", "chained").items():
        assert on == off and tensors > 10, step
