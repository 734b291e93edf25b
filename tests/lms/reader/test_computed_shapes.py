"""Shapes that a step computes from known shapes are known to its plan."""

from typing import Any

import pytest
from child_job import run_job

pytestmark = pytest.mark.tensorflow


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    pytest.importorskip("tensorflow")
    return run_job("computed_shapes_job.py")


@pytest.mark.parametrize("spec", ["known", "open", "iterator", "loop"])
def test_sizes_that_the_graph_computes_are_planned(seen: dict[str, Any], spec: str) -> None:
    assert seen[spec]["open"] == 0
    assert seen[spec]["planned"] is not None and seen[spec]["swapped"] > 0
