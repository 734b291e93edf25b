"""What Grappler does to an edited step."""

import pytest
from child_job import run_job

pytestmark = pytest.mark.tensorflow


def test_constants_that_nobody_reads_take_no_memory() -> None:
    """TensorFlow 2.15 makes such zeros of ``momentum * 0.0``, one for each variable."""
    pytest.importorskip("tensorflow")
    seen = run_job("grappler_job.py")
    assert seen["swapped"] > 0
    assert seen["more"] < 2 * seen["tensor"], "one variable got a new chunk; four constants would show"
