"""Sessions of compat.v1: planned at their first run of a step, with the same bits."""

from typing import Any

import pytest
from child_job import run_job

pytestmark = pytest.mark.tensorflow

STEPS = 8


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    pytest.importorskip("tensorflow")
    return run_job("session_job.py")


LATE = ("a session of nothing", "the initializer", "the graph is final")
"""When LMS is switched on: a session that was made before is planned all the same."""


@pytest.mark.parametrize("way", ["hook", "enabled", *LATE])
def test_a_session_swaps_in_each_step_and_trains_to_the_same_bits(seen: dict[str, Any], way: str) -> None:
    found = seen[way]
    assert found["weights"] == seen["plain"]["steps"]
    (tensors,) = found["edited"]
    assert tensors >= 5 and found["moved"] == tensors * STEPS
    assert found["said"] == []
    assert "session graph" in found["report"]


def test_a_session_is_planned_from_where_lms_is_switched_on(seen: dict[str, Any]) -> None:
    found = seen["a step"]
    assert found["weights"] == seen["plain"]["steps"]
    assert found["moved"] == sum(found["edited"]) * (STEPS - 3) > 0


def test_a_session_trains_on_where_lms_is_switched_off(seen: dict[str, Any]) -> None:
    weights, moved, at_last = seen["switched off"]
    assert weights == seen["plain"]["steps"]
    assert moved == at_last > 0, "its step runs unedited again"


def test_the_graph_stays_as_it_is(seen: dict[str, Any]) -> None:
    refused, same, edited = seen["graph"]
    assert "no gradients" in refused
    assert same and edited == 1


def test_a_while_loop_of_tensorflow_1_trains_to_the_same_bits(seen: dict[str, Any]) -> None:
    found = seen["while loop"]
    assert found["weights"] == seen["plain"]["while loop"]
    assert sum(found["edited"]) > 2 and found["moved"] > 0


def test_a_value_may_be_fed_in_the_middle_of_a_step(seen: dict[str, Any]) -> None:
    found = seen["feed"]
    assert found["weights"] == seen["plain"]["feed"] != seen["plain"]["steps"]
    assert found["moved"] > 0


def test_a_session_that_runs_out_of_memory_says_what_was_planned() -> None:
    """And runs smaller steps afterwards."""
    ((kind, text),) = run_job("session_oom_job.py")["errors"]
    assert kind == "ResourceExhaustedError" and "OOM when allocating" in text
    assert "LMS: the step ran out of memory on CPU:0 (limit 40.0 MiB)" in text
    assert "Policy 'all' swaps all that it can already: take a smaller batch" in text.splitlines()[-1]
