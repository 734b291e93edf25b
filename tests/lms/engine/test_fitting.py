"""A step that fits for certain is not read before somebody asks for its figures."""

from typing import Any

import pytest
from child_job import run_job

pytestmark = pytest.mark.tensorflow


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    pytest.importorskip("tensorflow")
    return run_job("fitting_job.py")


@pytest.mark.parametrize("case", ["ample", "unknown"])
def test_what_needs_no_plan_is_read_for_the_report_alone(seen: dict[str, Any], case: str) -> None:
    found = seen[case]
    assert (found["read"], found["read_for_the_report"], found["again"]) == (0, 1, True)
    assert found["ops"] > 24 and found["peak"] == seen["debug"]["peak"] > 0


def test_the_report_says_why(seen: dict[str, Any]) -> None:
    assert "fits" in seen["ample"]["why"] and "no known limit" in seen["unknown"]["why"]


def test_what_may_not_fit_is_read_at_once(seen: dict[str, Any]) -> None:
    assert seen["tight"]["read"] == seen["debug"]["read"] == 1
