"""Two real jobs on one machine know of each other."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from jobs import LMSRUN, STUB, JobStarter

from launch.system.job_board import FOLDER
from lmsrun.options import OPTIONS, LaunchOptions

pytestmark = pytest.mark.ranks


@pytest.fixture
def start(tmp_path: Path) -> Iterator[JobStarter]:
    starter = JobStarter(tmp_path)
    yield starter
    starter.close()


def one_cpu() -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


def ask(*argv: str) -> str:
    done = subprocess.run([*LMSRUN, *argv], capture_output=True, text=True, timeout=300, check=False)
    assert "Traceback" not in done.stderr
    return done.stdout


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
@pytest.mark.parametrize("launcher", ["local", "mpirun"])
def test_two_jobs_at_once(start: JobStarter, launcher: str) -> None:
    cpus = sorted(os.sched_getaffinity(0))
    options = ("--launcher", launcher, "--gpus", "none", "--allow-run-as-root")
    first = start(STUB, "ready", "sleep=600", np=1, options=options, before=one_cpu)
    first.wait_ready(1)
    whose = f"job stub_rank.py (process {first.process.pid})"
    assert f"{whose} has CPUs {cpus[0]}" in ask("check")

    plan = json.loads(ask("plan", "--json", "-np", "1", "t.py"))
    assert str(cpus[0]) not in plan["ranks"][0]["cpus"].split(",")
    auto = json.loads(ask("plan", "--json", "-np", "auto", *options, "t.py"))
    assert len(auto["ranks"]) == len(cpus) - 1 and "-np auto is" in str(auto["warnings"])
    ignoring = json.loads(ask("plan", "--json", "-np", "1", "--no-avoid-busy", "t.py"))
    assert len(ignoring["ranks"][0]["cpus"]) > 1 and "shared" not in str(ignoring["warnings"])

    second = start(STUB, "exit=0", np=1, options=options)
    assert second.finish() == 0
    assert "shared" not in second.stderr.decode()
    third = start(STUB, "exit=0", np=len(cpus), options=options)
    assert third.finish() == 0
    assert f"CPU {cpus[0]} is shared with {whose}" in third.stderr.decode()

    first.signal(15)
    first.finish()
    assert "none runs here" in ask("check")
    assert not list(Path(os.environ["LMSRUN_JOBS_DIR"], "lmsrun-jobs").iterdir())


def test_a_rank_does_not_take_its_own_job_for_another(start: JobStarter) -> None:
    job = start(*LMSRUN, "-np", "1", "--no-lms", "true", np=1, options=())
    assert job.finish() == 0
    assert "shared" not in job.stderr.decode()


TURN_WHILE_ASKED = """
import fcntl, os, sys
from launch.system.job_board import FOLDER
from lmsrun import cli, neighbours

def ask(tree):
    folder = os.open(os.path.join(os.environ["LMSRUN_JOBS_DIR"], FOLDER), os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(folder)
    print("free", flush=True)
    return ()

neighbours.ask_gpu_uses = ask
sys.exit(cli.main(["run", *sys.argv[1:]], os.environ))
"""


@pytest.mark.parametrize("launcher", ["local", "mpirun"])
def test_no_job_waits_while_another_asks_for_the_gpus_in_use(launcher: str) -> None:
    """NVML takes seconds where it starts the GPUs first, and a job waits one for its turn."""
    Path(os.environ["LMSRUN_JOBS_DIR"], FOLDER).mkdir(exist_ok=True)
    options = ("--launcher", launcher, "--gpus", "none", "--allow-run-as-root", "--no-lms", "-np", "1")
    done = subprocess.run(
        [sys.executable, "-c", TURN_WHILE_ASKED, *options, "true"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "free\n"), done.stderr


def test_a_folder_that_was_named_and_cannot_be_had_ends_the_run(start: JobStarter) -> None:
    job = start(STUB, "ready", np=1, options=("--numa", "off", "--jobs-dir", "/proc/none"))
    assert job.finish() == 2
    said = b"lmsrun: --jobs-dir /proc/none: running jobs cannot be written down in /proc/none/lmsrun-jobs"
    assert said in job.stderr


@pytest.mark.parametrize("options", [("--jobs-dir", "board"), ()])
def test_a_relative_folder_is_one_of_the_current_folder(
    start: JobStarter, tmp_path: Path, options: tuple[str, ...]
) -> None:
    """Also where this user has a folder for running programs that would be taken otherwise."""
    (tmp_path / "board").mkdir()
    (tmp_path / "run").mkdir()
    environ = {"XDG_RUNTIME_DIR": str(tmp_path / "run"), "LMSRUN_JOBS_DIR": "none" if options else "board"}
    job = start("ls", "board", np=1, options=("--numa", "off", *options), environ=environ)
    assert job.finish() == 0, job.stderr
    assert job.stdout.decode() == f"{FOLDER}\n" and not list((tmp_path / "run").iterdir())


def test_check_takes_a_relative_folder_too(tmp_path: Path) -> None:
    for words, told in ((("--jobs-dir", "board"), "none"), ((), "board")):
        (tmp_path / "board").mkdir(exist_ok=True)
        subprocess.run(
            [*LMSRUN, "check", *words],
            env={**os.environ, "LMSRUN_JOBS_DIR": told},
            cwd=tmp_path,
            capture_output=True,
            timeout=300,
            check=False,
        )
        assert (tmp_path / "board" / FOLDER).is_dir()
        (tmp_path / "board" / FOLDER).rmdir()


def test_check_takes_the_folder_that_a_file_names(tmp_path: Path) -> None:
    (tmp_path / "lmsrun.toml").write_text(f'jobs-dir = "{tmp_path}"')
    environ = {name: text for name, text in os.environ.items() if name != "LMSRUN_JOBS_DIR"}
    subprocess.run(
        [*LMSRUN, "check"], env=environ, cwd=tmp_path, capture_output=True, timeout=300, check=False
    )
    assert (tmp_path / FOLDER).is_dir()


def test_texts_name_the_folder_below_the_one_that_is_given() -> None:
    assert f"folder in whose {FOLDER} " in OPTIONS["jobs_dir"].help
    usage = (Path(__file__).parents[2] / "docs" / "usage.md").read_text(encoding="utf-8")
    assert f"`{LaunchOptions.jobs_dir}/{FOLDER}`, or with `--jobs-dir DIR` in `DIR/{FOLDER}`" in usage
