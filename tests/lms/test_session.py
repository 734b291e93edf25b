"""Sessions of compat.v1: edited before their first run, with the same bits."""

from typing import Any

import pytest
from child_job import run_job

pytestmark = pytest.mark.tensorflow


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    pytest.importorskip("tensorflow")
    return run_job("session_job.py")


@pytest.mark.parametrize("way", ["hook", "enabled", "fed"])
def test_weights_are_bit_identical_and_the_graph_is_edited(seen: dict[str, Any], way: str) -> None:
    weights, added = seen[way]
    assert weights == seen["off"][0]
    assert added >= 20 and seen["off"][1] == 0


def test_the_report_knows_the_session(seen: dict[str, Any]) -> None:
    assert "session graph" in seen["report"]


def test_what_cannot_be_edited_is_refused(seen: dict[str, Any]) -> None:
    without_step, twice = seen["refusals"]
    assert "no gradients" in without_step
    assert "edited once" in twice


def test_a_while_loop_of_tensorflow_1_trains_as_it_is_after_a_notice(seen: dict[str, Any]) -> None:
    (plain, silent), (weights, said) = seen["while off"], seen["while on"]
    assert weights == plain
    assert not any("while loop" in text for text in silent)
    assert any(
        "stays as it is: the graph holds a while loop of compat.v1; call" in text
        and "enable_control_flow_v2()" in text
        for text in said
    )


def test_an_edit_that_would_come_too_late_is_reported(seen: dict[str, Any]) -> None:
    assert any("build the whole graph before the first session.run" in text for text in seen["too late"])


@pytest.mark.parametrize("ran", ["a step", "the initializer"])
def test_a_session_that_has_run_before_lms_was_enabled_is_told_and_not_edited(
    seen: dict[str, Any], ran: str
) -> None:
    """It reads no edit any more: an edited graph would be reported, and nothing would be swapped."""
    late = seen["open"][ran]
    assert (late["edited"], late["moved"], len(late["said"])) == (0, 0, 2), late["said"]
    assert any("the session was made before lms.enable()" in text for text in late["said"])
    (why,) = late["why"]
    assert "call lms.enable() before the session is made" in why


def test_a_session_of_an_empty_graph_is_not_late(seen: dict[str, Any]) -> None:
    begun = seen["open"]["nothing"]
    assert begun["edited"] == 1 and begun["moved"] > 0


def test_a_finalized_graph_is_told_and_not_edited(seen: dict[str, Any]) -> None:
    late = seen["finalized"]
    assert (late["edited"], late["moved"]) == (0, 0)
    assert any("pass lms.session.LMSSessionRunHook()" in text for text in late["said"])
    assert "the graph is finalized" in late["why"][0]


def test_a_fed_value_that_readers_would_not_see_is_refused(seen: dict[str, Any]) -> None:
    assert seen["bypassed"].startswith("seen2:0 is fed")
    assert "placeholder_with_default" in seen["bypassed"]
