"""Looking at running jobs from outside: whose they are, what their ranks use, and where these run."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import create_autospec

import pytest

from launch.model.topology import Gpu
from launch.monitor.sample import Monitor, find_jobs, read_drift, read_last_line
from launch.receipts.running_note import NAME, read_running_note, write_running_note

THREADS = """
import os, threading
event = threading.Event()
def stray():
    os.sched_setaffinity(threading.get_native_id(), {cpus!r})
    print("here", flush=True)
    event.wait()
threading.Thread(target=stray).start()
"""


def note(folder: Path, cpus: frozenset[int] = frozenset({0}), output: Path | None = None) -> Path:
    """The private folder of a job of this process with one rank, which is this process too."""
    folder.mkdir(mode=0o700, parents=True)
    gpu = Gpu(0, "0000:01:00.0")
    plans = [
        SimpleNamespace(rank=0, host="localhost", cpus=cpus, gpu=None),
        SimpleNamespace(rank=1, host="elsewhere", cpus=frozenset({1}), gpu=gpu),
    ]
    write_running_note(folder, "train.py --epochs 3", output, plans, os.getpid())  # type: ignore[arg-type]
    for rank, host in ((0, "localhost"), (1, "elsewhere")):
        start = {"rank": rank, "host": host, "pid": os.getpid()}
        (folder / f"rank-{rank}.start.json").write_text(json.dumps(start))
    return folder


@pytest.fixture
def stray() -> Iterator[tuple[int, set[int]]]:
    """A process with a second thread that runs elsewhere than the first, where there are two CPUs."""
    here = sorted(os.sched_getaffinity(0))
    if len(here) < 2:
        pytest.skip("one CPU; needed two")
    with subprocess.Popen(
        [sys.executable, "-c", THREADS.format(cpus={here[1]})],
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: os.sched_setaffinity(0, {here[0]}),
    ) as child:
        assert child.stdout is not None and child.stdout.readline() == "here\n"
        yield child.pid, set(here[:2])
        child.kill()


def test_the_note_comes_back_as_it_was_written(tmp_path: Path) -> None:
    found = read_running_note(note(tmp_path / "lmsrun-a", output=tmp_path / "out"))
    assert found is not None
    assert (found.pid, found.title, found.output_dir) == (
        os.getpid(),
        "train.py --epochs 3",
        tmp_path / "out",
    )
    assert [(rank.rank, rank.host, rank.cpus, rank.gpu) for rank in found.ranks] == [
        (0, "localhost", {0}, None),
        (1, "elsewhere", {1}, "0000:01:00.0"),
    ]


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"schema": "lmsrun.job-folder/1"}', '{"ranks": 3}'])
def test_a_damaged_note_is_no_job(content: str, tmp_path: Path) -> None:
    folder = note(tmp_path / "lmsrun-a")
    (folder / NAME).write_text(content)
    assert find_jobs([tmp_path]) == ()


def test_only_private_folders_of_living_jobs_count(tmp_path: Path) -> None:
    own = note(tmp_path / "lmsrun-own")
    note(tmp_path / "lmsrun-open").chmod(0o755)
    ended = note(tmp_path / "lmsrun-ended")
    content = json.loads((ended / NAME).read_text())
    (ended / NAME).write_text(json.dumps({**content, "pid": 2**30}))
    (tmp_path / "lmsrun-link").symlink_to(own)
    assert [job.folder for job in find_jobs([tmp_path, tmp_path / "none"])] == [own]
    assert find_jobs([tmp_path], pid=1) == ()
    assert [job.folder for job in find_jobs([tmp_path], pid=os.getpid())] == [own]


def test_a_look_at_this_process_and_not_at_that_of_another_host(tmp_path: Path) -> None:
    folder = note(tmp_path / "lmsrun-a", frozenset(os.sched_getaffinity(0)))
    status = {"time": 1.0, "peak_bytes": 5, "planned_peak_bytes": 7, "bytes_out": 3, "bytes_in": 2}
    (folder / "lms-status.0.json").write_text(json.dumps({**status, "steps": 9, "step_s": 0.5}))
    (found,) = find_jobs([tmp_path])
    monitor = Monitor()
    monitor.look(found)
    here, elsewhere = monitor.look(found).ranks
    assert here.cpu_percent is not None and here.drift == ""
    assert (here.memory_bytes, here.planned_bytes, here.steps, here.step_s) == (5, 7, 9, 0.5)
    assert (elsewhere.cpu_percent, elsewhere.gpu_percent, elsewhere.drift) == (None, None, None)


def test_bytes_a_second_are_those_between_two_statuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, monitor = note(tmp_path / "lmsrun-a"), Monitor()
    (found,) = find_jobs([tmp_path])
    monkeypatch.setattr("launch.monitor.sample.time.time", lambda: 12.0)
    rates = []
    for when, moved in ((10.0, 100), (10.0, 100), (12.0, 500), (12.0, 500)):
        (folder / "lms-status.0.json").write_text(
            json.dumps({"time": when, "bytes_out": moved, "bytes_in": 0})
        )
        rates.append(monitor.look(found).ranks[0].swap_bytes_s)
    assert rates == [0.0, 0.0, 200.0, 200.0]
    monkeypatch.setattr("launch.monitor.sample.time.time", lambda: 60.0)
    assert monitor.look(found).ranks[0].swap_bytes_s == 0.0


def test_a_thread_that_left_its_place_is_told(stray: tuple[int, set[int]]) -> None:
    pid, both = stray
    first, second = sorted(both)
    assert read_drift([pid], frozenset(both)) == ""
    assert read_drift([pid], frozenset({first})) == f"1 thread on CPUs {second}"
    assert read_drift([2**30], frozenset({first})) is None


def test_the_last_line_of_the_stream_that_spoke_last(tmp_path: Path) -> None:
    assert read_last_line(tmp_path, 0) == ""
    (tmp_path / "rank-0.stdout").write_bytes(b"first\nstep 1\rstep 2\x1b[0m\n\n")
    os.utime(tmp_path / "rank-0.stdout", (10, 10))
    (tmp_path / "rank-0.stderr").write_bytes(b"x" * 10_000 + b"\nwarning\n")
    os.utime(tmp_path / "rank-0.stderr", (5, 5))
    assert read_last_line(tmp_path, 0) == "step 2"
    os.utime(tmp_path / "rank-0.stderr", (20, 20))
    assert read_last_line(tmp_path, 0) == "warning"
    with open(tmp_path / "rank-0.stderr", "a") as file:
        file.write("E0000 00:00:1795418933.519504    8380 cuda_platform.cc:52] failed call to cuInit\n")
    assert read_last_line(tmp_path, 0) == "warning", "TensorFlow's own log says little of a rank"
    (tmp_path / "rank-0.stderr").write_text("WARNING: All log messages before absl::InitializeLog()\n")
    assert read_last_line(tmp_path, 0).startswith("WARNING: All log")


def test_the_use_of_a_gpu_is_asked_by_its_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pynvml = pytest.importorskip("pynvml")
    nvml = create_autospec(pynvml)
    nvml.NVMLError = pynvml.NVMLError
    nvml.nvmlDeviceGetHandleByPciBusId.side_effect = {"0000:01:00.0": "gpu"}.__getitem__
    nvml.nvmlDeviceGetUtilizationRates.side_effect = {"gpu": SimpleNamespace(gpu=87, memory=3)}.__getitem__
    monkeypatch.setattr("launch.monitor.sample.import_nvml", lambda: nvml)
    folder = note(tmp_path / "lmsrun-a")
    start = json.dumps({"rank": 1, "host": socket.gethostname(), "pid": os.getpid()})
    (folder / "rank-1.start.json").write_text(start)
    (found,) = find_jobs([tmp_path])
    monitor = Monitor()
    assert [rank.gpu_percent for rank in monitor.look(found).ranks] == [None, 87.0]
    nvml.nvmlDeviceGetUtilizationRates.side_effect = pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
    assert [rank.gpu_percent for rank in monitor.look(found).ranks] == [None, None]
    nvml.nvmlInit.assert_called_once_with()
