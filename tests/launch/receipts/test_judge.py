"""Receipts: written whole, read as data, judged against the plan."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.model.plan import RankPlan
from launch.model.topology import Gpu
from launch.receipts.file import write_receipt
from launch.receipts.judge import (
    MAX_RECEIPT_BYTES,
    from_json,
    judge_rank,
    judge_ranks,
    read_first_failure,
    read_receipts,
    to_json,
)
from lmsrun.render.receipts import render_receipts

GPU = Gpu(0, "0004:05:00.0", "Tesla V100")
PLAN = RankPlan(0, 0, "localhost", GPU, 8, frozenset(range(4)), "bind", frozenset({8}), 38038, {}, ("true",))
START: dict[str, Any] = {
    "rank": 0,
    "local_rank": 0,
    "host": "ac922",
    "pid": 7,
    "cpus": "0-3",
    "mem_policy": "bind",
    "mem_nodes": "8",
    "host_mem_limit_mb": 38038,
    "verified": True,
    "reasons": [],
}
INIT = {"rank": 0, "pid": 7, "cpus": "0-3", "mem_policy": "bind", "mem_nodes": "8"}
LMS_ON = {"lms": {"requested": "auto", "active": True, "mode": "graph", "why": "asked"}}


def test_a_rank_where_the_plan_put_it_is_verified() -> None:
    receipt = judge_rank(PLAN, {"start": START, "init": INIT, "framework": LMS_ON}, "auto")
    assert (receipt.verified, receipt.reasons, receipt.host, receipt.lms) == (True, (), "ac922", "graph")
    table = render_receipts([receipt])
    assert "0004:05:00.0 Tesla V100" in table
    assert "yes, also after hvd.init()" in table


@pytest.mark.parametrize(
    ("stages", "reason"),
    [
        ({}, "no receipt: the worker did not get as far as its program"),
        ({"end": {"how": "exited with code 3"}}, "no receipt: the worker exited with code 3"),
        ({"start": {**START, "cpus": "0"}}, "CPUs 0 at start, planned 0-3"),
        (
            {"start": {**START, "mem_policy": "none", "mem_nodes": ""}},
            "memory policy none at start, planned bind 8",
        ),
        ({"start": START, "init": {**INIT, "cpus": "0-127"}}, "CPUs 0-127 after hvd.init(), planned 0-3"),
        ({"start": {**START, "verified": False, "reasons": ["refused"]}}, "refused"),
        ({"start": {**START, "cpus": ["hostile"]}}, "CPUs unknown at start, planned 0-3"),
    ],
)
def test_what_differs_is_not_verified_and_said(stages: dict[str, Any], reason: str) -> None:
    receipt = judge_rank(PLAN, stages, "auto")
    assert receipt.verified is False
    assert reason in receipt.reasons
    assert f"NO: {reason}" in render_receipts([receipt])


def test_a_rank_that_nothing_binds_is_not_verified_and_off_is_neither() -> None:
    unbound = RankPlan(0, 0, "h", None, None, frozenset(), "none", frozenset(), None, {}, ("true",))
    assert judge_rank(unbound, {"start": START}, "auto").verified is False
    assert judge_rank(PLAN, {"start": START}, "off").verified is None
    assert "NO" not in render_receipts([judge_rank(PLAN, {"start": START}, "off")])


def test_receipts_arrive_whole_and_hostile_files_are_left_out(tmp_path: Path) -> None:
    write_receipt(tmp_path, 0, "start", START)
    (tmp_path / "rank-1.start.json").write_text("[1, 2]")
    (tmp_path / "rank-2.start.json").write_bytes(b"\xff{")
    (tmp_path / "rank-3.start.json").write_text(json.dumps({"x": "y" * MAX_RECEIPT_BYTES}))
    (tmp_path / "rank-4.start.json").symlink_to(tmp_path / "rank-0.start.json")
    (tmp_path / "rank-5.start.json").mkdir()
    (tmp_path / "rank-6.start.json").write_text("[" * 60000)
    found = read_receipts(tmp_path, range(7))
    assert found == {0: {"start": START}, **{rank: {} for rank in range(1, 7)}}
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_the_first_failure_is_that_of_a_rank_that_can_be(tmp_path: Path) -> None:
    assert read_first_failure(tmp_path) is None
    for name, content in {
        "-1": {"rank": -1, "code": 3},
        "0": {"rank": 0, "code": 4, "host": "a", "how": "x"},
        "00": {"rank": 0, "code": 5},
        "2": {"rank": 2, "code": 0},
    }.items():
        path = tmp_path / f"rank-{name}.end.json"
        path.write_text(json.dumps(content))
        os.utime(path, (1, 1))
    found = read_first_failure(tmp_path)
    assert found is not None
    assert (found.rank, found.exit_code in (4, 5)) == (0, True)


def test_text_of_a_receipt_cannot_drive_the_terminal() -> None:
    receipt = judge_rank(PLAN, {"start": {**START, "host": "a\x1b[2Jb\n" + "c" * 1000}}, "auto")
    assert receipt.host.startswith("a?[2Jb?")
    assert len(receipt.host) <= 300


def test_lms_that_was_asked_for_and_is_not_active_says_why() -> None:
    framework = {"lms": {"requested": "auto", "active": False, "mode": "off", "why": "no engine"}}
    assert judge_rank(PLAN, {"start": START, "framework": framework}, "auto").lms == "not active: no engine"


def test_a_gpu_that_no_tensorflow_reports_is_told_beside_the_planned_one() -> None:
    seen = {**LMS_ON, "visible_gpus": ["/physical_device:GPU:0"]}
    for framework, is_told in (({**LMS_ON, "visible_gpus": []}, True), (seen, False), (None, False)):
        stages = {"start": START, **({"framework": framework} if framework else {})}
        table = render_receipts([judge_rank(PLAN, stages, "auto")])
        assert ("0004:05:00.0 Tesla V100, but TensorFlow reports none  " in table) is is_told
        assert table.endswith("yes")
    without = judge_rank(replace(PLAN, gpu=None), {"start": START, "framework": LMS_ON}, "auto")
    assert "TensorFlow" not in render_receipts([without])


def test_json_round_trip() -> None:
    receipts = judge_ranks([PLAN], {0: {"start": START}}, "auto")
    assert from_json(json.loads(json.dumps(to_json("id", receipts)))) == receipts
    for damaged in ({}, [], {"schema": "lmsrun.receipts/1", "ranks": [{}]}):
        with pytest.raises(ValueError, match="document"):
            from_json(damaged)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(st.dictionaries(st.sampled_from([*START, "lms", "visible_gpus"]), JSON), JSON)
def test_any_receipt_can_be_judged_and_shown(fields: dict[str, Any], lms: Any) -> None:
    stages = {"start": fields, "framework": {**fields, "lms": lms}, "init": fields}
    assert render_receipts([judge_rank(PLAN, stages, "auto")]).count("\n") == 2


@pytest.mark.parametrize(
    ("numa", "counted", "verified", "reasons"),
    [
        ("auto", 2, True, ()),
        ("auto", 1, False, ("Horovod counts 1 rank after hvd.init(), started 2",)),
        ("off", 1, False, ("Horovod counts 1 rank after hvd.init(), started 2",)),
        ("off", 2, None, ("binding is off",)),
        ("auto", "1", True, ()),
    ],
)
def test_ranks_that_have_not_found_each_other(
    numa: str, counted: object, verified: bool | None, reasons: tuple[str, ...]
) -> None:
    stages = {"start": START, "init": {**INIT, "hvd_size": counted}}
    receipt = judge_rank(PLAN, stages, numa, world_size=2)
    assert (receipt.verified, receipt.reasons) == (verified, reasons)
    assert judge_rank(PLAN, stages, "auto").verified, "an elastic job's ranks come and go"
