"""The status that a rank tells while it trains, for ``lmsrun top`` and for TensorBoard."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from child_job import run_job

from lms.errors import LMSError
from lms.report.step_status import Board, StatusFile, StepStatus, open_status
from lms.transports.base import StoreStats


class Owner:
    """What holds a step."""


class Clock:
    """A clock that each reading moves on."""

    def __init__(self, pace: float) -> None:
        self.now, self.pace = 0.0, pace

    def __call__(self) -> float:
        self.now += self.pace
        return self.now


class Kept:
    """A sink that keeps what it gets."""

    def __init__(self, error: OSError | None = None) -> None:
        self.got: list[Any] = []
        self._error = error

    def write(self, status: Any, report: Any) -> None:
        self.got.append(status)
        if self._error:
            raise self._error


def report(out: int = 0) -> Any:
    device = SimpleNamespace(memory=lambda: (10, 20), limit_bytes=100)
    edited = (SimpleNamespace(bytes_out=8, bytes_in=6),)
    return SimpleNamespace(
        device=device, edited=edited, planned_peak_bytes=30, store=StoreStats(bytes_out=out)
    )


def test_it_is_told_once_a_second_and_of_training_steps_only() -> None:
    kept, owner, reads = Kept(), Owner(), []

    def read() -> tuple[Any, bool]:
        reads.append(1)
        return report(out=64), True

    status = StepStatus([kept], read, Clock(0.05))  # a step takes one reading, and so does what is between
    assert status.run(Owner(), lambda: "result") == "result"
    status.planned(owner)
    for _ in range(25):
        status.run(owner, lambda: None)
    assert [told.steps for told in kept.got] == [1, 11, 21] and len(reads) == 3
    assert kept.got[1].step_s == pytest.approx(0.05)
    assert (kept.got[1].bytes_out, kept.got[1].planned_peak_bytes, kept.got[1].limit_bytes) == (64, 30, 100)


def test_what_nothing_counts_is_the_plan_s() -> None:
    kept, owner = Kept(), Owner()
    status = StepStatus([kept], lambda: (report(out=5), False), Clock(1))
    status.planned(owner)
    for _ in range(2):
        status.run(owner, lambda: None)
    assert [(told.bytes_out, told.bytes_in) for told in kept.got] == [(8, 6), (16, 12)]


def test_a_place_that_is_gone_is_left_alone_and_training_goes_on() -> None:
    gone, kept, owner = Kept(OSError("gone")), Kept(), Owner()
    status = StepStatus([gone, kept], lambda: (report(), True), Clock(1))
    status.planned(owner)
    assert [status.run(owner, lambda: "result") for _ in range(3)] == ["result"] * 3
    assert (len(gone.got), len(kept.got)) == (1, 3)


def test_the_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    file, owner = StatusFile(tmp_path, "3"), Owner()
    status = StepStatus([file], lambda: (report(), True), Clock(1))
    status.planned(owner)
    status.run(owner, lambda: None)
    before = os.stat(tmp_path / "lms-status.3.json").st_ino
    status.run(owner, lambda: None)
    assert [path.name for path in tmp_path.iterdir()] == ["lms-status.3.json"]
    assert os.stat(tmp_path / "lms-status.3.json").st_ino != before
    told = json.loads((tmp_path / "lms-status.3.json").read_text())
    assert (told["schema"], told["pid"], told["steps"]) == ("lms.status/1", os.getpid(), 2)


def test_nobody_wants_to_know(tmp_path: Path) -> None:
    read: Any = lambda: (report(), True)  # noqa: E731
    assert open_status(None, {}, read) is None
    assert open_status(None, {"RANK": "0"}, read) is None
    assert open_status(None, {"RANK": "0", "LMSRUN_RECEIPT_DIR": str(tmp_path / "none")}, read) is None
    assert open_status(None, {"RANK": "0", "LMSRUN_RECEIPT_DIR": str(tmp_path)}, read) is not None


def test_a_folder_for_tensorboard_that_cannot_be_had(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(LMSError, match=r"file' is no folder; needed in tensorboard \(LMS_TENSORBOARD\)"):
        Board(str(tmp_path / "file"), {})


FULL_DISK = """
import resource
from lms.report import event_file

writer = event_file.tf.io.TFRecordWriter
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
for place in ("file", "none/file"):
    event_file.tf.io.TFRecordWriter = lambda path: writer(place)
    try:
        file = event_file.EventFile(".")
        file.text(1, "tag", "text" * 10000)
        file.flush()
    except OSError as error:
        print(error)
"""


@pytest.mark.tensorflow
def test_a_full_disk_is_an_os_error(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", FULL_DISK]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(done.stdout.splitlines()) == 2, done.stdout


@pytest.mark.tensorflow
def test_a_rank_tells_while_it_trains(tmp_path: Path) -> None:
    folder, board = tmp_path / "job", tmp_path / "board"
    folder.mkdir()
    (folder / "rank-1.start.json").write_text('{"rank": 1, "verified": true}')
    found = run_job(
        "status_job.py",
        str(folder),
        LMSRUN_RECEIPT_DIR=str(folder),
        RANK="1",
        WORLD_SIZE="2",
        LMS_TENSORBOARD=str(board),
        LMS_MIN_TENSOR_BYTES="1000",
        TF_CPU_ALLOCATOR_USE_BFC="true",
        TF_CPU_BFC_MEM_LIMIT_IN_MB="200",
    )
    first, last = found["first"], found["last"]
    assert first["steps"] == 1 and last["steps"] > 4 and last["pid"] == found["pid"]
    assert last["limit_bytes"] == 200 << 20
    assert last["bytes_out"] > first["bytes_out"] > 0
    assert last["planned_peak_bytes"] > 0 and last["peak_bytes"] > 0 and last["step_s"] > 0
    (events,) = (board / "rank-1").iterdir()
    content = events.read_bytes()
    for tag in (b"lms/step_seconds", b"lms/peak_MiB", b"lms/MiB_out", b"lms/report", b"lmsrun/receipt/start"):
        assert tag in content, tag
    assert b'"verified": true' in content and b"Large Model Support" in content
