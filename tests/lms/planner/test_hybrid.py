"""The search for what to recompute, on networks of the benchmarks."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lms.config import LMSConfig
from lms.planner import hybrid
from lms.planner.hybrid import decide, score
from lms.simulate.cost_model import Costs
from lms.swaps.case import Case

sys.path.append(str(Path(__file__).resolve().parents[3] / "bench"))  # last: it has an lms.py, too

sys.path.append(str(Path(__file__).resolve().parents[1] / "report"))

from lms_models import unet3d  # noqa: E402
from report_steps import net  # noqa: E402

PCIE_4 = Costs(flops_per_s=9e12, device_bytes_per_s=6e11, out_bytes_per_s=24e9, in_bytes_per_s=24e9)
"""A V100 behind such a link."""


def test_what_reads_from_the_host_does_so_while_repeats_are_searched() -> None:
    """A U-Net fits into a quarter of its memory with concatenations on the host alone."""
    graph = unet3d(1, 128)
    case = Case.of(graph, LMSConfig(), PCIE_4)
    budget = min(schedule.timeline.peak_bytes for schedule in case.schedules) // 4
    config = replace(LMSConfig(policy="budget", budget_bytes=budget, margin=0.0), recompute="auto")
    found = decide(graph, config, "GPU", None, PCIE_4)
    assert found.plan.feasible and found.relocation is not None and found.recomputation is not None
    assert found.case.makespan_s(found.plan) <= 1.2 * sum(case.seconds)


@pytest.mark.parametrize(("allowed", "searches"), [(1.1, 1), (0.9, 2)])
def test_choices_for_less_memory_are_looked_for_where_a_plan_takes_longer_than_its_choice(
    monkeypatch: pytest.MonkeyPatch, allowed: float, searches: int
) -> None:
    """Without a limit no memory lies in pieces, so a plan takes as long as its choice."""
    looked: list[int] = []

    class Counted(hybrid._Search):
        def finalists(self) -> list[hybrid._Trial]:
            looked.append(self._config.budget_bytes or 0)
            return super().finalists()

    monkeypatch.setattr(hybrid, "_Search", Counted)
    monkeypatch.setattr(hybrid, "IN_PIECES", allowed)
    graph = unet3d(1, 128)
    budget = min(one.timeline.peak_bytes for one in Case.of(graph, LMSConfig(), PCIE_4).schedules) // 3
    config = replace(LMSConfig(policy="budget", budget_bytes=budget, margin=0.0), recompute="auto")
    found = decide(graph, config, "GPU", None, PCIE_4)
    assert found.plan.feasible
    assert looked == [budget, int(0.8 * budget)][:searches]


@pytest.mark.parametrize("share", [2, 4, 8])
def test_what_ops_read_on_the_host_counts_as_held_there(share: int) -> None:
    """Operands of concatenations are sent to the host beside the swaps, and together they fit."""
    graph = unet3d(1, 128)
    config = LMSConfig(policy="all", recompute="off")
    moved = decide(graph, config, "GPU", None, PCIE_4).plan.bytes_out
    held = decide(graph, config, "GPU", None, replace(PCIE_4, host_room_bytes=moved // share)).plan
    assert 0 < held.bytes_out <= moved // share


@pytest.mark.parametrize(("lacks", "least"), [(False, 1), (True, 2 * hybrid.FINALISTS + 1)])
def test_more_choices_are_planned_where_none_of_the_first_fits(
    monkeypatch: pytest.MonkeyPatch, lacks: bool, least: int
) -> None:
    graph = net(24)
    limit_bytes = Case.of(graph, LMSConfig(), PCIE_4).peak_before_bytes // 3
    planned, real = [], hybrid.plan_recomputed

    def counted(*arguments: Any) -> hybrid.Decision:
        planned.append(real(*arguments))
        return replace(planned[-1], peak_bytes=limit_bytes + 1) if lacks else planned[-1]

    monkeypatch.setattr(hybrid, "plan_recomputed", counted)
    monkeypatch.setattr(hybrid, "refined", lambda found, *_: found)
    found = decide(graph, LMSConfig(margin=0.0), "GPU", limit_bytes, PCIE_4)
    assert least <= len(planned) <= (2 * hybrid.MOST_FINALISTS if lacks else 2 * hybrid.FINALISTS)
    assert (found.recomputation is None) == lacks


def test_a_faster_plan_of_swaps_alone_is_always_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a plan that recomputes could be slower than the best of swaps alone."""
    graph, looked = net(24), []
    limit_bytes = Case.of(graph, LMSConfig(), PCIE_4).peak_before_bytes // 3

    def refined(found: hybrid.Decision, *_: Any) -> hybrid.Decision:
        looked.append(found.recomputation)
        return found

    monkeypatch.setattr(hybrid, "refined", refined)
    monkeypatch.setattr(hybrid, "REFINED", 0)
    monkeypatch.setattr(hybrid, "_unbroken_s", lambda *_: 0.0)
    decide(graph, LMSConfig(margin=0.0), "GPU", limit_bytes, PCIE_4)
    assert looked and set(looked) == {None}


def test_a_plan_that_fits_is_better_than_a_faster_one_that_does_not() -> None:
    graph, config = net(4), LMSConfig(policy="auto", min_tensor_bytes=1)
    limit = Case.of(graph, config, PCIE_4).peak_before_bytes
    fast = decide(graph, config, "GPU", 2 * limit, PCIE_4)
    slow = decide(graph, replace(config, policy="all"), "GPU", limit, PCIE_4)
    assert score(fast, limit)[-1] <= score(slow, limit)[-1]
    lacking = replace(fast, peak_bytes=limit + 1)
    assert score(slow, limit) < score(lacking, limit)
    unsure = replace(fast, doubt="by chance")
    assert score(fast, limit) < score(unsure, limit) < score(lacking, limit)
