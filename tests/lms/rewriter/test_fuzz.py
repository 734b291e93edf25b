"""Random graphs with conditions and loops run edited, to the same bits; damaged ones are refused."""

import os

import pytest
from child_job import run_job

pytestmark = pytest.mark.tensorflow

GRAPHS = os.environ.get("LMS_FUZZ_GRAPHS", "60")
"""``make bench-bits`` takes 10,000."""


def test_random_graphs_run_edited_and_damaged_ones_are_refused() -> None:
    pytest.importorskip("tensorflow")
    seen = run_job("rewriter/fuzz_job.py", "0", GRAPHS)
    assert seen["differ"] == seen["refused"] == seen["faults"] == []
    assert seen["swapped"] > int(GRAPHS) / 2
    assert seen["repeated"] > int(GRAPHS) / 2
    assert seen["gates"] > int(GRAPHS) / 4
    assert len(seen["racing"]) < int(GRAPHS) / 5, "TensorFlow leaves the order of few sums to chance"
