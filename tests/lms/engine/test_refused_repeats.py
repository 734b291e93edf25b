"""A step whose repeated ops are refused is planned with swaps alone, and says so."""

import pytest
from child_job import run_job

pytestmark = pytest.mark.tensorflow


def test_refused_repeats_leave_a_plan_of_swaps() -> None:
    pytest.importorskip("tensorflow")
    found = run_job("refused_repeats_job.py")
    assert found["again"] is None and found["swapped"] > 10
    assert any(text.endswith("is planned without recomputing: no repeats here") for text in found["warnings"])
