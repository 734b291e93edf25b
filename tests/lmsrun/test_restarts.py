"""``--max-restarts``: a job whose rank fails is started again, from the script's own checkpoint."""

import json
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from jobs import LMSRUN, ROOT, JobStarter

pytestmark = pytest.mark.ranks

TRAINS = """
import os, pathlib, sys
attempt, rank = os.environ["LMSRUN_ATTEMPT"], os.environ["RANK"]
saved = pathlib.Path(f"step-{rank}")
step = int(saved.read_text()) if saved.exists() else 0
print(f"attempt {attempt} goes on at {step}")
draft = pathlib.Path(f"draft-{rank}")
draft.write_text(str(step + 1))
draft.replace(saved)  # Whole or not at all: a rank is ended when another has failed.
sys.exit(int(sys.argv[1]) if step < 2 and rank == "0" else 0)
"""
WAITS = """
import pathlib, time
pathlib.Path("ready-0").touch()
time.sleep(60)
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[JobStarter]:
    (tmp_path / "train.py").write_text(TRAINS)
    starter = JobStarter(tmp_path)
    yield starter
    starter.close()


def options(restarts: int, *more: str) -> tuple[str, ...]:
    return ("--numa", "off", "--max-restarts", str(restarts), *more)


def test_a_job_goes_on_from_its_checkpoint(start: JobStarter) -> None:
    job = start("train.py", "7", np=1, options=options(3, "--output-dir", "out"))
    assert job.finish() == 0, job.stderr
    told = job.stderr.decode()
    assert "lmsrun: a rank failed with code 7; restart 1 of 3\n" in told
    assert "lmsrun: a rank failed with code 7; restart 2 of 3\n" in told and "restart 3" not in told
    said = [f"attempt {number} goes on at {number}" for number in range(3)]
    assert job.stdout.decode().splitlines() == said
    for folder, line in zip(("", "restart-1", "restart-2"), said, strict=True):
        path = job.folder / "out" / "latest" / folder
        assert (path / "rank-0.stdout").read_text() == f"{line}\n"
        assert (path / "receipts.json").is_file()
    whole = json.loads((job.folder / "out" / "latest" / "receipts.json").read_text())
    assert (whole["attempt"], whole["exit_code"], whole["exit_codes"]) == (2, 0, {"0": 0})
    first, second = whole["earlier_attempts"]
    assert (first["attempt"], first["exit_codes"], second["exit_code"]) == (0, {"0": 7}, 7)
    kept = [
        json.loads((job.folder / "out" / "latest" / told["receipts"]).read_text()) for told in (first, second)
    ]
    assert [(one["attempt"], one["exit_code"], len(one["ranks"])) for one in kept] == [(0, 7, 1), (1, 7, 1)]
    job.assert_nothing_left()


def test_the_last_failure_counts(start: JobStarter) -> None:
    job = start("train.py", "7", np=1, options=options(1))
    assert job.finish() == 7
    assert job.stderr.decode().count("a rank failed") == 1
    assert job.last_line == "lmsrun: rank 0 on localhost (no GPU) exited with code 7"


READS = """
import os, sys
print(os.environ["LMSRUN_ATTEMPT"], repr(sys.stdin.read()))
sys.exit(int(os.environ["LMSRUN_ATTEMPT"]) == 0)
"""


@pytest.mark.parametrize("is_file", [True, False])
def test_a_restarted_rank_reads_the_file_again_and_is_told_of_what_is_none(
    start: JobStarter, tmp_path: Path, is_file: bool
) -> None:
    (tmp_path / "read.py").write_text(READS)
    (tmp_path / "data").write_text("data")
    shell = '"$@" < data' if is_file else 'cat data | "$@"'
    command = ("sh", "-c", shell, "sh", *LMSRUN, "run")
    job = start("read.py", np=1, options=options(1, "--stdin", "0"), command=command)
    assert job.finish() == 0, job.stderr
    again = "'data'" if is_file else "''"
    assert job.stdout.decode().splitlines() == ["0 'data'", f"1 {again}"]
    assert (b"restart 1 of 1; rank 0 reads on where the last" in job.stderr) is not is_file


@pytest.mark.parametrize("code", [2, 127])
def test_what_is_wrong_stays_wrong(start: JobStarter, code: int) -> None:
    job = start("train.py", str(code), np=1, options=options(3))
    assert job.finish() == code
    assert job.last_line.startswith(f"lmsrun: not started again: code {code} says that ")
    assert job.stdout == b"attempt 0 goes on at 0\n"


def test_a_job_that_somebody_ended_is_not_started_again(start: JobStarter, tmp_path: Path) -> None:
    (tmp_path / "wait.py").write_text(
        "import pathlib, time\npathlib.Path('ready-0').touch()\ntime.sleep(60)\n"
    )
    job = start("wait.py", np=1, options=options(3))
    job.wait_ready(1)
    job.signal(signal.SIGTERM)
    assert job.finish() == 143
    assert "restart" not in job.stderr.decode()


def test_a_launcher_that_fails_is_started_again(start: JobStarter, tmp_path: Path) -> None:
    if shutil.which("mpirun.openmpi") is None:
        pytest.skip("mpirun.openmpi is not installed here")
    mpirun = ("--launcher", "mpirun", "--mpirun", "mpirun.openmpi", "--allow-run-as-root")
    job = start("train.py", "7", options=options(3, *mpirun, "--output-dir", "out"))
    assert job.finish() == 0, job.stderr
    assert job.stderr.decode().count("a rank failed with code 7; restart") == 2
    last = tmp_path / "out" / "latest" / "restart-2"
    assert (last / "rank-0.stdout").read_text() == "attempt 2 goes on at 2\n"


def test_horovodrun_gets_its_files_anew_for_each_attempt(start: JobStarter, tmp_path: Path) -> None:
    """On one host the ranks' environment is in a file: with the attempt's number, and with its folder."""
    if not Path(sys.executable).with_name("horovodrun").exists():
        pytest.skip("horovodrun is not installed here")
    horovodrun = ("--launcher", "horovodrun", "--framework", "horovod", "--output-dir", "out")
    (tmp_path / "step-0").write_text("1")
    job = start("train.py", "7", np=1, options=options(1, *horovodrun))
    assert job.finish() == 0, job.stderr
    for number, folder in enumerate(("", "restart-1")):
        said = (tmp_path / "out" / "latest" / folder / "rank-0.stdout").read_text()
        assert said == f"attempt {number} goes on at {number + 1}\n"
    job.assert_nothing_left()


SIGNALLED_LATE = """
import os, signal, sys, time
sys.path.insert(0, sys.argv.pop(1))
from launch.supervise.supervisor import JobLoop
from lmsrun import cli

front, number, run = os.getpid(), int(sys.argv.pop(1)), JobLoop.run
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it

def run_and_signal(self):
    code = run(self)
    heard = []
    signal.signal(number, lambda *_: heard.append(number))
    os.kill(front, number)
    while not heard:
        time.sleep(0.01)
    return code

JobLoop.run = run_and_signal
sys.exit(cli.main(sys.argv[1:], os.environ))
"""
"""Signals the front when the supervisor has decided how the job ended, and waits until it was passed on."""


SIGNALLED_BETWEEN = """
import os, signal, sys
sys.path.insert(0, sys.argv.pop(1))
from launch.supervise import run_folder
from lmsrun import cli

number = int(sys.argv.pop(1))
signal.signal(signal.SIGINT, signal.default_int_handler)
run_folder.set_aside = lambda *_: os.kill(os.getpid(), number)
sys.exit(cli.main(sys.argv[1:], os.environ))
"""
"""Signals the front between two attempts."""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_between_two_attempts_ends_the_job_in_order(
    start: JobStarter, number: signal.Signals, tmp_path: Path
) -> None:
    command = (sys.executable, "-c", SIGNALLED_BETWEEN, str(ROOT), str(int(number)), "run")
    watched = ("--output-dir", "out", "--metrics", "job.prom")
    job = start("train.py", "7", np=1, options=options(3, *watched), command=command)
    assert job.finish() == 128 + number, job.stderr
    assert job.stdout == b"attempt 0 goes on at 0\n"
    assert "lmsrun_jobs 0" in (tmp_path / "job.prom").read_text(), "who looked at the job has ended, too"
    job.assert_nothing_left()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_that_comes_as_an_attempt_ends_keeps_the_next_from_starting(
    start: JobStarter, number: signal.Signals
) -> None:
    command = (sys.executable, "-c", SIGNALLED_LATE, str(ROOT), str(int(number)), "run")
    job = start("train.py", "7", np=1, options=options(3), command=command)
    assert job.finish() == 128 + number, job.stderr
    assert job.stdout == b"attempt 0 goes on at 0\n"
    assert job.last_line == f"lmsrun: not started again: {number.name} came as the ranks ended"
    job.assert_nothing_left()
