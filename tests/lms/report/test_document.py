"""The report as plain values: what it tells, how large it may become, and its page."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tensorflow")
from report_steps import BASE, MIB, plan_step

import lms
from lms.config import LMSConfig
from lms.device.device import Device
from lms.errors import LMSError
from lms.report import step_document
from lms.report.document import build_document
from lms.report.history import MOST_STEPS, History
from lms.report.html import write_document
from lms.report.stats import Report
from lms.transports.base import StoreStats

Golden = Callable[[str, str], None]
CONFIG = LMSConfig(enabled=True, policy="auto", recompute="auto")
LIMIT = 420 * MIB


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    planned, report, history = plan_step(36, LIMIT, CONFIG)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_document, "POLICIES_S", 1e6)  # How many are planned must not hang on this machine.
        return build_document(report, CONFIG, planned, history, {"RANK": "0"})


def test_other_policies_are_planned_only_as_long_as_there_is_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_document, "POLICIES_S", 0.0)
    planned, report, _ = plan_step(6, LIMIT, CONFIG)
    policies = build_document(report, CONFIG, planned)["step"]["policies"]
    assert [point[0] for point in policies["points"]] == ["this plan", "no swapping"]
    assert policies["left_out"].startswith("for want of time: all, budget 90%, ")


def test_the_other_policies_of_a_step_with_a_budget_need_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_document, "POLICIES_S", 0.0)
    config = LMSConfig(enabled=True, policy="budget", budget_bytes=200 * MIB)
    planned, report, _ = plan_step(6, LIMIT, config)
    points = build_document(report, config, planned)["step"]["policies"]["points"]
    assert [point[0] for point in points] == ["this plan", "no swapping"]


def test_what_pages_are_tested_with_is_what_is_written(document: dict[str, Any], golden: Golden) -> None:
    here = {"host": "h", "pid": 1, "written": "2026-01-01T00:00:00Z", "versions": {"tensorflow": "2.21.0"}}
    golden("lms-report.json", json.dumps({**document, **here}, indent=0) + "\n")


def test_a_step_is_told_with_its_fates(document: dict[str, Any]) -> None:
    step = document["step"]
    fates = {row[4] for row in step["tensors"]}
    assert fates >= {"kept", "swapped", "recomputed"}
    swapped = next(row for row in step["tensors"] if row[4] == "swapped")
    assert swapped[0].startswith("model/") and swapped[2] == "float32 32x56x56x64"
    assert swapped[5].startswith("out after model/") and ", back after " in swapped[5]
    assert step["before"]["peak_bytes"] > step["after"]["peak_bytes"]
    assert step["after"]["peak_bytes"] <= LIMIT - BASE
    names = [step["tensors"][number][0] for number in step["at_peak"]["tensors"]]
    assert len(set(names)) == len(names) > 3


def test_bands_and_the_rest_add_up_to_the_peak(document: dict[str, Any]) -> None:
    for name in ("before", "after"):
        side = document["step"][name]
        when = side["peak_s"]
        live = sum(
            document["step"]["tensors"][number][3]
            for number, begin, end in side["stays"]
            if begin <= when < end or (begin == end == when)
        )
        rest = [level for at, level in side["rest"] if at <= when][-1]
        assert abs(live + rest - side["peak_bytes"]) <= 0.1 * side["peak_bytes"]


def test_the_copies_are_those_of_the_plan(document: dict[str, Any]) -> None:
    planned, _, _ = plan_step(36, LIMIT, CONFIG)
    side = document["step"]["after"]
    assert len(side["out"]) == len(planned.plan.swaps)
    assert len(side["in"]) == sum(len(swap.swap_ins) for swap in planned.plan.swaps)
    assert side["copies_left_out"] == 0


def test_the_pool_holds_chunks_and_holes(document: dict[str, Any]) -> None:
    pool = document["step"]["pool"]
    ends = [0, *(offset + nbytes for offset, nbytes, _ in pool["chunks"])]
    assert all(offset >= end for (offset, _, _), end in zip(pool["chunks"], ends, strict=False))
    assert sum(nbytes for _, nbytes, _ in pool["chunks"]) == pool["used"]
    assert pool["used"] + pool["free_bytes"] == pool["size"] >= pool["asked"]
    nameless = [nbytes for _, nbytes, number in pool["chunks"] if number is None]
    assert len(nameless) <= 1 and sum(nameless) < MIB  # what is set apart for small buffers


def test_this_plan_stands_among_the_others(document: dict[str, Any]) -> None:
    points = {
        name: (nbytes, seconds, here)
        for name, nbytes, seconds, here in document["step"]["policies"]["points"]
    }
    assert points["this plan"][2] is True
    assert points["no swapping"][0] > points["this plan"][0] > points["all"][0]
    assert points["no swapping"][1] < points["all"][1]


def test_a_step_of_thousands_of_tensors_stays_small() -> None:
    config = LMSConfig(enabled=True, policy="all")
    planned, report, history = plan_step(700, 9000 * MIB, config)
    assert len(planned.graph.tensors) >= 3_500
    assert len(json.dumps(build_document(report, config, planned, history))) < 300_000


def test_many_steps_are_thinned_and_counted() -> None:
    history, owner = History(lambda: None), MIB.__class__
    history.planned(owner)
    for _ in range(5 * MOST_STEPS):
        history.run(owner, lambda: None)
    assert history.count == 5 * MOST_STEPS
    assert MOST_STEPS / 2 <= len(history.steps) <= MOST_STEPS
    numbers = [step.number for step in history.steps]
    assert numbers == sorted(numbers) and numbers[0] == 0 and numbers[-1] > 4 * MOST_STEPS


def test_only_planned_steps_are_kept_and_an_unread_peak_is_not_asked_again() -> None:
    asked: list[int] = []
    history = History(lambda: asked.append(1))  # type: ignore[arg-type, func-returns-value]
    history.run(int, lambda: None)
    history.planned(int)
    assert history.run(int, lambda: 7) == 7
    history.run(int, lambda: None)
    assert history.count == 2 and len(asked) == 1


def test_a_report_of_nothing_has_a_page_too(tmp_path: Path) -> None:
    report = Report(Device("CPU:0", None), "none", (), None, StoreStats(), idle="off: nobody asked for it")
    report.to_html(tmp_path / "idle.html")
    page = (tmp_path / "idle.html").read_text()
    assert "Large Model Support planned nothing: off: nobody asked for it." in page


def test_a_script_gets_a_page_without_lms(tmp_path: Path) -> None:
    lms.report().to_html(tmp_path / "page.html")
    assert "<!doctype html>" in (tmp_path / "page.html").read_text()


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    for path in (None, "", 7):
        with pytest.raises(
            LMSError, match=r"found (None|''|7); needed in lms.report\(\).to_html\(\): the name"
        ):
            lms.report().to_html(path)  # type: ignore[arg-type]
    with pytest.raises(LMSError, match=r"there is no folder .*; needed in lms.report\(\).to_html\(\)"):
        lms.report().to_html(tmp_path / "none" / "page.html")


def test_a_document_that_is_too_large_goes_without_its_step(tmp_path: Path, document: dict[str, Any]) -> None:
    write_document({**document, "step": {"x": "y" * (1 << 20)}}, tmp_path)
    (path,) = tmp_path.iterdir()
    assert path.name == "rank-0.lms.json" and path.stat().st_size < 1 << 19
    assert json.loads(path.read_text())["step"] is None
