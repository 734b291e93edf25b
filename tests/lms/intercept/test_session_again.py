"""Steps of compat.v1's sessions that are planned again, for more rows or because memory ran out."""

from typing import Any

import pytest
from child_job import run_job

pytestmark = pytest.mark.tensorflow

RETRIED = ("run", "callable", "references", "final graph", "third step", "hook")


@pytest.fixture(scope="module")
def plain() -> Any:
    pytest.importorskip("tensorflow")
    return run_job("session_again_job.py", "400", "plain")


@pytest.fixture(scope="module")
def seen() -> Any:
    """Without new plans more rows need more than 30 MiB."""
    pytest.importorskip("tensorflow")
    return run_job("session_again_job.py", "30", "lms")


@pytest.mark.parametrize("case", RETRIED)
def test_a_step_that_failed_twice_behind_its_updates_ends_in_the_same_bits(
    plain: Any, seen: Any, case: str
) -> None:
    assert seen[case]["found"] == plain[case]["found"]
    assert seen[case]["retries"] == 2 and len(seen[case]["tensors"]) == 3
    told = [text for text in seen[case]["said"] if "planned again" in text]
    first, second = told
    assert "with margin 0.25 instead of 0.00" in first and "with policy all instead of budget" in second
    assert first.startswith("a step" if case == "third step" else "the first step")


@pytest.mark.parametrize("case", ["grows", "callable grows", "random numbers"])
def test_more_rows_get_another_plan(plain: Any, seen: Any, case: str) -> None:
    """The kernels of a session draw on where the step is planned again."""
    assert seen[case]["found"] == plain[case]["found"]
    assert seen[case]["retries"] == 0 and seen[case]["tensors"]
    (said,) = seen[case]["said"]
    assert said.startswith("session graph was planned for batches of 64x256, and is again for 4096x256; ")


@pytest.mark.parametrize("case", ["buckets", "callable buckets"])
def test_long_sequences_and_many_short_ones_get_a_plan_each(plain: Any, seen: Any, case: str) -> None:
    """One plan for both would be for 256 of 512 words, which no device of 30 MiB holds."""
    assert seen[case]["found"] == plain[case]["found"]
    assert seen[case]["retries"] == 0 and len(seen[case]["tensors"]) == 2
    # Before the first step of each plan, and the next three of the latest.
    assert 2 <= seen[case]["reads"] <= 5
    (said,) = seen[case]["said"]
    assert "session graph was planned for batches of 256x16x256, and is again for 8x512x256" in said


REFUSED = {
    "iterator": "those of an iterator of the session; feed the batches.",
    "draws": "or begin with a smaller batch.",
    "beside": "in the same session, or with the same variables.",
    "tiny": "nothing was planned for it.",
    "shape": "cannot be given the value back that it had.",
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_undone_is_not_tried_again(seen: Any, case: str) -> None:
    assert seen[case]["retries"] == 0
    assert seen[case]["found"].endswith(REFUSED[case])


def test_a_session_whose_graph_is_not_optimized_is_told(seen: Any) -> None:
    (said,) = seen["interactive"]["said"]
    assert "session graph is not planned" in said and "make a tf.compat.v1.Session" in said


def test_an_error_tells_the_plan_of_the_step_that_failed(seen: Any) -> None:
    text = seen["two"]["found"]
    assert "Planned for session graph:" in text and "other/" not in text


def test_every_case_is_looked_at(seen: Any) -> None:
    assert seen.keys() == {
        *RETRIED,
        "grows",
        "callable grows",
        "random numbers",
        "buckets",
        "callable buckets",
        "interactive",
        "two",
        *REFUSED,
    }
