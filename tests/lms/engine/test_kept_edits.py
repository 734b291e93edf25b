"""A graph that was edited before is not planned again."""

from dataclasses import replace
from types import SimpleNamespace
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


MIB = 1 << 20


@pytest.mark.parametrize(
    ("in_use", "peak", "tried", "room"),
    [
        (200_000, 18 * MIB, False, 20 * MIB - 200_000),
        (200_000, 21 * MIB, False, 20 * MIB - 200_000),
        (0, 20 * MIB - 100_000, False, 20 * MIB),
        (100_000, 20 * MIB - 90_000, False, None),
        (-100_000, 20 * MIB + 50_000, False, 20 * MIB + 100_000),
        (2_000_000, 18 * MIB, False, None),
        (2_000_000, 20 * MIB - 90_000, True, 20 * MIB),
        (1 << 20, 18 * MIB, True, 19 * MIB),
    ],
)
def test_a_kept_edit_serves_where_its_peak_still_fits(
    in_use: int, peak: int, tried: bool, room: int | None
) -> None:
    """One that was tried is taken as it is, and tells the room that it was planned for if it has to."""
    pytest.importorskip("tensorflow")
    from lms.engine.kept_edits import Edit, KeptEdits
    from lms.passes.work import Residents, Work

    device: Any = SimpleNamespace(limit_bytes=22 * MIB)
    decision: Any = SimpleNamespace(peak_bytes=peak)
    task: Any = SimpleNamespace(tried=tried)
    place: Any = None
    work = Work(task, device, place, residents=Residents(2 * MIB), decision=decision)

    class Counted:
        """Finds that more lies on the device than when the edit was planned."""

        def apply(self, work: Work) -> Work:
            """Count what lies there now."""
            return replace(work, residents=Residents(2 * MIB + in_use))

    counting: Any = Counted()
    resources: Any = None
    again = KeptEdits(counting, resources).used_again(Edit((work,)), task, [device])
    assert (again.works[0].limit_bytes if again else None) == room
