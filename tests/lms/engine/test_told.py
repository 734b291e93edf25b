"""What a step brings about is told to whom it concerns, and nothing is told that is not so."""

from typing import Any

import pytest
from child_job import run_job

pytestmark = pytest.mark.tensorflow


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    pytest.importorskip("keras")
    return run_job("told_job.py")


def test_a_step_in_a_branch_that_is_not_taken_brings_no_warning(seen: dict[str, Any]) -> None:
    found = seen["conditional"]
    assert found["told"] == []
    assert found["before"] == 0 < found["swapped"], "and it is edited"


def test_a_program_that_makes_errors_of_warnings_gets_one(seen: dict[str, Any]) -> None:
    found = seen["warnings_as_errors"]
    assert found["error"].startswith("LMSWarning:") and "'Nowhere'" in found["error"]
    assert found["edited"] == found["swapped"] == 0, "the report does not claim the edit"
    assert found["again"] and found["edited again"] == 2, "it did not run, and is planned in its next call"


def test_a_callback_with_an_unknown_scope_ends_fit(seen: dict[str, Any]) -> None:
    assert seen["a_callback"].startswith("LMSArgumentError: excl_output_by_scopes: 'nowhere'")


def test_an_interrupt_is_raised_in_its_own_thread(seen: dict[str, Any]) -> None:
    found = seen["interrupted"]
    assert (found["here"], found["there"]) == ("KeyboardInterrupt: ", [""])


def test_a_step_whose_planning_is_interrupted_does_not_run_and_is_planned_later(seen: dict[str, Any]) -> None:
    found = seen["interrupted"]
    assert found["first"], "its variables are as they were"
    assert found["planned"] == 2, "this one, and the one that it is compared with"


@pytest.mark.parametrize("which", ["function", "concrete"])
def test_an_interrupted_step_can_be_called_with_and_without_its_function(
    seen: dict[str, Any], which: str
) -> None:
    assert seen["interrupted_callers"][which] == ["KeyboardInterrupt: ", "", "", "", 1]


def test_an_interrupted_session_does_not_run_and_is_planned_later(seen: dict[str, Any]) -> None:
    assert seen["interrupted_elsewhere"]["session"] == ["KeyboardInterrupt: ", 64.0 * 64, 1]


def test_an_interrupted_body_is_planned_in_the_next_call(seen: dict[str, Any]) -> None:
    assert seen["interrupted_elsewhere"]["body"] == ["KeyboardInterrupt: ", 2.0, 1]


def test_an_interrupted_trace_lets_the_draws_of_others_go_on(seen: dict[str, Any]) -> None:
    without, interrupted = seen["drawn"]
    assert without == interrupted and len(set(without)) == 4


def test_arguments_are_known_after_a_body_was_planned(seen: dict[str, Any]) -> None:
    assert "1024" in seen["a_body"]


def test_two_loops_of_one_call_are_told_apart(seen: dict[str, Any]) -> None:
    assert seen["two_loops"]["places"] == len(seen["two_loops"]["executed"]) == 2


def test_each_configuration_plans_what_ran_under_another(seen: dict[str, Any]) -> None:
    none, first, again = seen["enabled_again"]
    assert none == [1, 0]
    assert first[0] == again[0] == 1, "and the report tells of it"
    assert first[1] == again[1] > 0


def test_a_graph_that_is_handed_over_while_lms_rests_is_planned(seen: dict[str, Any]) -> None:
    assert seen["resting"] == [True, True], "it rested, and is at work now"
