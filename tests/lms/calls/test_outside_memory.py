"""Check when a step is planned again because more lies on the device beside it."""

from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.tensorflow
MIB = 1 << 20


class Step:
    """Stands for a function, or for a session and what it fetches."""


class Desk:
    """Runs an ``OutsideMemory`` beside a device whose memory the test sets; plans leave 20 of 50 MiB free."""

    def __init__(self) -> None:
        from lms.calls.outside_memory import OutsideMemory
        from lms.intercept.batch_growth import Growth

        self.in_use, self.growth = 0, Growth()
        rooms = SimpleNamespace(kept_bytes=lambda name: 0)
        resources: Any = SimpleNamespace(rooms=rooms)
        self.outside = OutsideMemory(self.growth, resources)

    def plan(self, step: Any, *, peak: int = 30, is_body: bool = False, name: str = "", **more: Any) -> None:
        """Plan a step with what lies there now before it."""
        task = SimpleNamespace(guest=False, is_body=is_body, config=SimpleNamespace(policy="auto"))
        plan = SimpleNamespace(peak_bytes=peak * MIB, feasible=True)
        device = SimpleNamespace(name="CPU:0", memory=lambda: (self.in_use, 0))
        work: Any = SimpleNamespace(
            task=task,
            decision=SimpleNamespace(plan=plan),
            limit_bytes=50 * MIB,
            most_bytes=None,
            whole=False,
            residents=SimpleNamespace(nbytes=self.in_use),
            device=device,
        )
        self.growth.planned(step, (), name, **more)
        self.outside.planned(step, name, work)

    def grow(self, mebibytes: int, step: Any) -> str:
        """Let more lie there, and begin the step."""
        self.in_use += mebibytes * MIB
        return self.outside.outgrown(step, "")


@pytest.fixture
def desk() -> Desk:
    pytest.importorskip("tensorflow")
    return Desk()


def test_half_of_what_a_plan_leaves_free_is_for_others(desk: Desk) -> None:
    step = Step()
    desk.plan(step)
    assert desk.grow(10, step) == ""
    assert desk.grow(1, step) == (
        "was planned with 0.0 MiB on CPU:0 before it, and is again: there are 11.0 MiB now"
    )
    assert desk.growth.generation(step) == 1
    assert desk.grow(0, step) == "", "it has no plan yet"


def test_a_step_is_planned_again_at_most_four_times_whatever_others_were(desk: Desk) -> None:
    for _ in range(3):
        step = Step()
        found = []
        for _ in range(6):
            desk.plan(step)
            found.append(bool(desk.grow(11, step)))
        assert found == [True] * 4 + [False] * 2


@pytest.mark.parametrize("order", [(False, True), (True, False)])
def test_bodies_and_smaller_graphs_of_a_step_leave_its_threshold(desk: Desk, order: tuple[bool, ...]) -> None:
    step = Step()
    for is_body in order:
        desk.plan(step, peak=1 if is_body else 30, is_body=is_body)
        desk.plan(step, peak=1 if is_body else 30)
    assert desk.grow(11, step) != ""


def test_a_step_whose_random_numbers_would_begin_anew_keeps_its_plan(desk: Desk) -> None:
    step = Step()
    desk.plan(step, draws=True)
    assert desk.grow(20, step) == ""


def test_nothing_is_known_of_a_step_without_a_plan(desk: Desk) -> None:
    assert [desk.outside.outgrown(one, "") for one in (Step(), None)] == ["", ""]
