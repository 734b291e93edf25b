"""Random training steps end in the same bits with LMS as without it."""

import pytest
from bits_runs import ALL, skip_without
from child_job import run_job

pytestmark = pytest.mark.tensorflow

CHUNK = 100
"""Graphs in one process: what is traced is never given back."""


@pytest.mark.parametrize(
    ("policy", "count"), [("all", 1000), ("budget", 1000)] if ALL else [("all", 16), ("budget", 6)]
)
def test_random_graphs_end_in_the_same_bits(policy: str, count: int) -> None:
    skip_without("3")
    for first in range(0, count, CHUNK):
        few = min(CHUNK, count - first)
        found = run_job("bits/random_graphs_job.py", str(first), str(few), policy)
        assert (found["differ"], found["failed"], found["not finite"]) == ({}, {}, []), found
        assert len(found["left to chance"]) <= 1 + few // 10, found
        if policy == "all":
            assert len(found["unswapped"]) <= 1 + few // 20, found
