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


def test_options_come_back_as_they_were() -> None:
    """One that the program has not set is not set afterwards, and what it sets meanwhile stays."""
    pytest.importorskip("tensorflow")
    seen = run_job("options_job.py")
    arithmetic = "arithmetic_optimization"
    for asked in (None, False, True):
        before, during, after = seen[str(asked)]
        assert during["read"].get(arithmetic) == asked and during["functions"] != before["functions"]
        assert after == before and arithmetic not in after["read"]
    *_, own = seen["meanwhile"]
    assert (own["read"][arithmetic], own["read"]["constant_folding"]) == (True, True)
    before, during, after = seen["set before"]
    assert during["read"][arithmetic] is True and before["read"][arithmetic] is False and after == before
