"""A graph that was edited before is not planned again."""

from typing import Any

import pytest
from child_job import run_job

pytestmark = pytest.mark.tensorflow


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    pytest.importorskip("keras")
    return run_job("kept_edits_job.py")


def test_a_model_that_is_compiled_again_is_planned_once(seen: dict[str, Any]) -> None:
    for wanted, ran in seen["ran"]:
        assert wanted == ran > 0
    assert seen["plans"][0] == 1, "and the second as the first was"


def test_a_larger_batch_is_planned_anew(seen: dict[str, Any]) -> None:
    assert seen["plans"][1] == 2


def test_the_kept_edit_trains_to_the_same_bits(seen: dict[str, Any]) -> None:
    assert seen["same"]


def test_a_kept_edit_keeps_no_model_alive(seen: dict[str, Any]) -> None:
    assert seen["freed"]


def test_a_kept_edit_is_not_taken_where_lms_is_refused(seen: dict[str, Any]) -> None:
    assert seen["swapped_though_refused"] == 0
