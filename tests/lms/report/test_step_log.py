"""The file of steps that LMS_STATS_FILE names."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lms.config import STATS_OWNER_VARIABLE, doubtful_variables
from lms.errors import LMSError
from lms.report.step_log import COLUMNS, StepLog, rank_path
from lms.transports.base import StoreStats

ROOT = Path(__file__).resolve().parents[3]


class Owner:
    """What holds a step."""


def lines_of(path: Path) -> list[list[str]]:
    return [line.split(",") for line in path.read_text().splitlines()]


def test_a_line_for_each_step_of_what_was_planned(tmp_path: Path) -> None:
    swapped = [0]
    path, owner = tmp_path / "steps.csv", Owner()

    def counters() -> tuple[StoreStats, int]:
        return StoreStats(swap_outs=swapped[0], bytes_out=8 * swapped[0]), 64

    def step() -> str:
        swapped[0] += 2
        return "result"

    log = StepLog(str(path), {}, counters)
    assert log.run(owner, "unplanned", step) == "result"
    log.planned(owner)
    log.run(owner, "a", step)
    log.run(owner, "b", lambda: None, idle=False)
    log.run(owner, "c", lambda: None)
    header, *rows = lines_of(path)
    assert header == list(COLUMNS)
    assert [row[:2] + row[3:] for row in rows] == [
        ["0", "a", "2", "0", "16", "0", "64"],
        ["1", "c", "0", "0", "0", "0", "64"],
    ]


def test_what_nothing_counts_stays_empty(tmp_path: Path) -> None:
    path, owner = tmp_path / "steps.csv", Owner()
    log = StepLog(str(path), {}, lambda: (None, None))
    log.planned(owner)
    log.run(owner, "a", lambda: None, idle=False)
    assert lines_of(path)[1][3:] == [""] * 5


def test_each_rank_has_its_own_file() -> None:
    path = Path("out/steps.csv")
    assert rank_path(path, {"WORLD_SIZE": "2", "RANK": "1"}) == Path("out/steps.rank1.csv")
    assert rank_path(path, {"WORLD_SIZE": "1", "RANK": "0"}) == path
    assert rank_path(path, {}) == path


TRAINS = """
import sys
from lms.report.step_log import StepLog
class Owner:
    pass
owner, log = Owner(), StepLog(sys.argv[1], {}, lambda: (None, None))
log.planned(owner)
log.run(owner, sys.argv[2], lambda: None)
"""


def test_a_process_that_a_training_starts_has_its_own_file(tmp_path: Path) -> None:
    """It wrote over the lines of the one that had started it."""
    path, owner = tmp_path / "steps.csv", Owner()
    log = StepLog(str(path), {}, lambda: (None, None))
    log.planned(owner)
    log.run(owner, "before", lambda: None)
    command = [sys.executable, "-c", TRAINS, str(path), "child"]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True, timeout=300)
    log.run(owner, "after", lambda: None)
    assert [row[1] for row in lines_of(path)[1:]] == ["before", "after"]
    (other,) = set(tmp_path.iterdir()) - {path}
    assert other.suffix == ".csv" and [row[1] for row in lines_of(other)[1:]] == ["child"]


def test_a_process_that_trains_nothing_leaves_the_file_to_those_that_it_starts(tmp_path: Path) -> None:
    path = tmp_path / "steps.csv"
    StepLog(str(path), {}, lambda: (None, None))
    command = [sys.executable, "-c", TRAINS, str(path), "child"]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True, timeout=300)
    assert [*tmp_path.iterdir()] == [path] and [row[1] for row in lines_of(path)[1:]] == ["child"]


def test_what_another_process_has_written_meanwhile_stays(tmp_path: Path) -> None:
    path, owner = tmp_path / "steps.csv", Owner()
    log = StepLog(str(path), {}, lambda: (None, None))
    log.planned(owner)
    path.write_text("of another process")
    log.run(owner, "a", lambda: None)
    assert path.read_text() == "of another process" and log.path.name == f"steps.{os.getpid()}.csv"
    assert [row[1] for row in lines_of(log.path)[1:]] == ["a"]


def test_a_forked_process_has_its_own_file(tmp_path: Path) -> None:
    path, owner = tmp_path / "steps.csv", Owner()
    log = StepLog(str(path), {}, lambda: (None, None))
    log.planned(owner)
    log.run(owner, "before", lambda: None)
    if not (child := os.fork()):
        log.run(owner, "child", lambda: None)
        os._exit(0)
    os.waitpid(child, 0)
    log.run(owner, "after", lambda: None)
    assert [row[1] for row in lines_of(path)[1:]] == ["before", "after"]
    assert [row[1] for row in lines_of(tmp_path / f"steps.{child}.csv")[1:]] == ["child"]


def test_a_file_that_is_gone_begins_anew(tmp_path: Path) -> None:
    path, owner = tmp_path / "steps.csv", Owner()
    for name in ("before", "after"):
        log = StepLog(str(path), {}, lambda: (None, None))
        log.planned(owner)
        log.run(owner, name, lambda: None)
        rows = lines_of(path)
        path.unlink()
    assert rows[0] == list(COLUMNS) and [row[:2] for row in rows[1:]] == [["0", "after"]]


def test_a_device_is_written_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    owner, log = Owner(), StepLog("/dev/null", {}, lambda: (None, None))
    monkeypatch.setenv(STATS_OWNER_VARIABLE, "1:/dev/null")
    log.planned(owner)
    log.run(owner, "a", lambda: None)
    assert log.path == Path("/dev/null")


def test_no_warning_tells_of_the_variable_that_a_process_hands_on() -> None:
    assert doubtful_variables([STATS_OWNER_VARIABLE]) == []


def test_switching_off_and_on_again_goes_on_in_the_file(tmp_path: Path) -> None:
    path, owner = tmp_path / "steps.csv", Owner()
    for name in ("before", "after"):
        log = StepLog(str(path), {}, lambda: (None, None))
        log.planned(owner)
        log.run(owner, name, lambda: None)
    assert [row[:2] for row in lines_of(path)[1:]] == [["0", "before"], ["1", "after"]]


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    for path in (tmp_path / "none" / "steps.csv", tmp_path):
        with pytest.raises(LMSError, match=r"cannot write .*; needed in stats_file"):
            StepLog(str(path), {}, lambda: (None, None))


def test_a_file_that_cannot_be_written_any_more_ends_no_training(tmp_path: Path) -> None:
    path, owner, said = tmp_path / "folder" / "steps.csv", Owner(), list[str]()
    path.parent.mkdir()
    log = StepLog(str(path), {}, lambda: (None, None), said.append)
    log.planned(owner)
    path.parent.rmdir()
    assert [log.run(owner, "a", lambda: "result") for _ in range(2)] == ["result"] * 2
    assert said == [f"stats_file (LMS_STATS_FILE): cannot write {path}: No such file or directory"]


def test_a_process_that_trains_nothing_leaves_the_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "steps.csv"
    path.write_text("of another process")
    StepLog(str(path), {}, lambda: (None, None)).run(Owner(), "a", lambda: None)
    assert path.read_text() == "of another process"
