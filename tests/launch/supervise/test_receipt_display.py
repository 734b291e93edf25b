"""The table of ranks of a quiet job: shown for a rank that is bound wrongly, not for one that failed."""

import os
import signal
from pathlib import Path

import pytest

from launch.model.plan import LaunchPlan, RankPlan
from launch.receipts.file import write_receipt
from launch.supervise.children import choose_children
from launch.supervise.job import JobFiles, JobOptions
from launch.supervise.receipt_display import ReceiptDisplay
from launch.supervise.streams import Console, open_consoles

START = {"rank": 1, "cpus": "1", "mem_policy": "none", "mem_nodes": "", "reasons": []}


def rank(number: int) -> RankPlan:
    cpus = frozenset({number})
    return RankPlan(number, number, "here", None, None, cpus, "none", frozenset(), None, {}, ("shim",))


PLAN = LaunchPlan(2, "local", (rank(0), rank(1)), ())


@pytest.fixture
def console(tmp_path: Path) -> Console:
    fd = os.open(tmp_path / "said", os.O_CREAT | os.O_WRONLY)
    return open_consoles(fd, fd)[0]


def show(tmp_path: Path, console: Console, statuses: dict[int, int], late: bool = True) -> str:
    options = JobOptions(quiet=True, receipt_timeout_s=0)
    files = JobFiles("job", tmp_path, {}, None, (0, 0))
    children = choose_children(PLAN, options)
    display = ReceiptDisplay(PLAN, options, children, files, lambda receipts: "the table", console)
    display.look(statuses, late)
    console.finish()
    while console.sink.waiting:
        console.sink.pump()
    return (tmp_path / "said").read_text()


def test_a_rank_that_ended_before_its_receipt_shows_no_table(tmp_path: Path, console: Console) -> None:
    write_receipt(tmp_path, 1, "start", START)
    assert show(tmp_path, console, {0: signal.SIGTERM, 1: 3 << 8}) == ""


def test_a_rank_on_other_cpus_shows_the_table(tmp_path: Path, console: Console) -> None:
    write_receipt(tmp_path, 1, "start", {**START, "cpus": "0"})
    assert "the table" in show(tmp_path, console, {0: signal.SIGTERM, 1: 3 << 8})


def test_a_rank_that_runs_and_has_no_receipt_shows_the_table(tmp_path: Path, console: Console) -> None:
    write_receipt(tmp_path, 1, "start", START)
    assert "the table" in show(tmp_path, console, {}, late=False)
