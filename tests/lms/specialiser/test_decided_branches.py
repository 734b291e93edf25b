"""Sessions whose feeds decide conditions compute the same, and are planned as if there were none."""

from functools import cache
from typing import Any

import pytest
from child_job import run_job

pytestmark = pytest.mark.tensorflow

ACTIVATION = 8 * 16 * 16 * 32 * 4
"""Bytes of the tensor between two layers of the job's networks, of which five layers keep two or more."""
CASES = (
    *("batch norm", "dropout", "sums", "both ways", "default", "computed", "nested", "fetched", "callable"),
    *("threads", "values", "three", "both", "averages", "fed and run", "which", "many ways"),
)


@pytest.fixture(scope="module", params=["v1", "v2"])
def control_flow(request: pytest.FixtureRequest) -> str:
    """TensorFlow's older control flow and its newer one."""
    found: str = request.param
    return found


@cache
def seen(control_flow: str, mode: str) -> dict[str, Any]:
    pytest.importorskip("tensorflow")
    return run_job("branches_job.py", control_flow, mode)


@pytest.mark.parametrize("case", CASES)
def test_a_step_gives_the_same_bits(control_flow: str, case: str) -> None:
    plain, found = seen(control_flow, "plain")[case], seen(control_flow, "lms")[case]
    for what in {"bits", "seen", "others"} & plain.keys():
        assert found[what] == plain[what]


@pytest.mark.parametrize(
    ("case", "most"),
    [("batch norm", 4), ("dropout", 4), ("computed", 4), ("fetched", 4), ("sums", 6), ("callable", 6)],
)
def test_what_a_branch_makes_is_swapped(control_flow: str, case: str, most: int) -> None:
    found = seen(control_flow, "lms")[case]
    assert found["step"] <= most * ACTIVATION
    assert not found["warnings"]


def test_what_was_planned_is_measured(control_flow: str) -> None:
    pytest.importorskip("tensorflow")
    (found,) = run_job("branches_job.py", control_flow, "lms", "both").values()
    assert found["step"] <= 4 * ACTIVATION
    assert found["measured"] <= found["planned"] + 3 * ACTIVATION, "ops that meet, and larger chunks"


def test_gates_that_change_from_step_to_step_get_few_graphs(control_flow: str) -> None:
    assert len(seen(control_flow, "lms")["many ways"]["graphs"]) == 2 + 1  # of them one with conditions


def test_a_step_that_fits_takes_all_ways_until_its_batches_grow(control_flow: str) -> None:
    pytest.importorskip("tensorflow")
    plain = run_job("growing_job.py", control_flow, "plain", "400")
    found = run_job("growing_job.py", control_flow, "lms", "85")
    assert found["losses"] == plain["losses"]
    assert found["edited"] >= 2


def test_each_way_is_a_step_of_its_own(control_flow: str) -> None:
    names = seen(control_flow, "lms")["both ways"]["graphs"]
    assert names == ["session graph (fed=True)", "session graph 2 (fed=False)"]


def test_what_is_not_fed_has_its_default(control_flow: str) -> None:
    found = seen(control_flow, "lms")["default"]
    assert found["graphs"] == ["session graph", "session graph 2 (fed=False)"]
    assert found["step"] <= 6 * ACTIVATION


def test_two_threads_get_their_own_branches(control_flow: str) -> None:
    taken, left = seen(control_flow, "lms")["threads"]["seen"]
    assert len(taken) == len(left) == 1
    assert taken != left


def test_every_case_is_looked_at(control_flow: str) -> None:
    assert seen(control_flow, "plain").keys() == set(CASES)


def test_random_conditions_give_the_same_numbers() -> None:
    pytest.importorskip("tensorflow")
    found = run_job("random_conditions_job.py", "0", "6")
    assert found["differ"] == []
    assert found["after"] < 0.7 * found["before"]
