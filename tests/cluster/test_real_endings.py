"""How jobs end under every launcher: ranks have their time, the code is right, and no signal is lost."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import pytest
from cluster_run import clean_environ, lmsrun, needs, processes_with
from jobs import wait_until

pytestmark = [pytest.mark.ranks, pytest.mark.cluster]

SAVE = Path(__file__).resolve().with_name("save_rank.py")
SECONDS = "2.5"
"""Open MPI's own grace is 1 s."""
LAUNCHERS = {
    "openmpi": ("--launcher", "mpirun", "--mpirun", "mpirun.openmpi", "--allow-run-as-root"),
    "mpich": ("--launcher", "mpirun", "--mpirun", "mpirun.mpich"),
    "horovodrun": ("--launcher", "horovodrun"),
    "srun": ("--launcher", "srun"),
}


@pytest.fixture(params=LAUNCHERS)
def launcher(request: pytest.FixtureRequest) -> tuple[list[str], list[str], Mapping[str, str]]:
    """What stands before lmsrun, its options, and its environment."""
    words = [*LAUNCHERS[request.param], "--numa", "off", "-np", "2", "--oversubscribe"]
    if request.param == "srun":
        slurm = request.getfixturevalue("slurm")
        slurm.ready_again()
        # salloc passes no signal on.
        alloc = ["salloc", "--quiet", "--nodes=2", "--ntasks-per-node=1", "sh", "-c"]
        return [*alloc, 'echo $$ >pid; exec "$@"', "sh"], words, slurm.environ
    if request.param == "horovodrun":
        pytest.importorskip("horovod")
    else:
        needs(words[3])
    return ["sh", "-c", 'echo $$ >pid; exec "$@"', "sh"], words, {}


def start(
    launcher: tuple[list[str], list[str], Mapping[str, str]], folder: Path, how: str, *program: str
) -> "subprocess.Popen[bytes]":
    before, options, environ = launcher
    argv = [*before, *lmsrun("run", *options, "--", *(program or [str(SAVE)]), str(folder), SECONDS, how)]
    return subprocess.Popen(
        argv,
        cwd=folder,
        env={**clean_environ(), **environ, "TMPDIR": str(folder)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def names(folder: Path, kind: str) -> list[str]:
    return sorted(path.name for path in folder.glob(f"{kind}-*"))


def assert_nothing_left(folder: Path) -> None:
    assert processes_with(str(folder)) == []
    assert not list(folder.glob("lmsrun-*"))


def test_signals_reach_ranks_which_have_their_time(
    launcher: tuple[list[str], list[str], Mapping[str, str]], tmp_path: Path
) -> None:
    job = start(launcher, tmp_path, "wait")
    wait_until(lambda: len(names(tmp_path, "ready")) == 2, "the ranks are ready", 60)
    front = int((tmp_path / "pid").read_text())
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        os.kill(front, number)
    told = [f"told-{rank}-{int(number)}" for rank in (0, 1) for number in (signal.SIGUSR1, signal.SIGUSR2)]
    wait_until(lambda: names(tmp_path, "told") == told, "both ranks have been told of both", 30)
    os.kill(front, signal.SIGTERM)
    out, err = job.communicate(timeout=300)
    assert job.returncode == 0, err.decode()
    assert names(tmp_path, "saved") == ["saved-0", "saved-1"], err.decode()
    assert out.count(b"saving") == 2
    assert err.decode().splitlines()[-1] == "lmsrun: ended by SIGTERM"
    assert_nothing_left(tmp_path)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_that_ends_ranks_is_the_code(
    launcher: tuple[list[str], list[str], Mapping[str, str]], number: signal.Signals, tmp_path: Path
) -> None:
    job = start(launcher, tmp_path, "die")
    wait_until(lambda: len(names(tmp_path, "ready")) == 2, "the ranks are ready", 60)
    os.kill(int((tmp_path / "pid").read_text()), number)
    _, err = job.communicate(timeout=300)
    assert job.returncode == 128 + number, err.decode()
    assert_nothing_left(tmp_path)


def test_the_others_have_their_time_when_a_rank_fails(
    launcher: tuple[list[str], list[str], Mapping[str, str]], tmp_path: Path
) -> None:
    job = start(launcher, tmp_path, "fail")
    _, err = job.communicate(timeout=300)
    assert job.returncode == 7, err.decode()
    assert names(tmp_path, "saved") == ["saved-0"], err.decode()
    assert "rank 1 on " in err.decode().splitlines()[-1]
    assert_nothing_left(tmp_path)


def test_what_a_script_has_started_has_its_time_too(
    launcher: tuple[list[str], list[str], Mapping[str, str]], tmp_path: Path
) -> None:
    """A shell dies of SIGTERM at once; the program that it waits for saves what it has."""
    script = tmp_path / "run.sh"
    script.write_text(f'{sys.executable} {SAVE} "$@"\necho end\n')
    job = start(launcher, tmp_path, "wait", "sh", str(script))
    wait_until(lambda: len(names(tmp_path, "ready")) == 2, "the ranks are ready", 60)
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGTERM)
    _, err = job.communicate(timeout=300)
    assert job.returncode == 128 + signal.SIGTERM, err.decode()
    assert names(tmp_path, "saved") == ["saved-0", "saved-1"], err.decode()
    assert_nothing_left(tmp_path)


def test_nothing_survives_when_lmsrun_is_killed(
    launcher: tuple[list[str], list[str], Mapping[str, str]], tmp_path: Path
) -> None:
    """Front and supervisor at once, as ``pkill -9 lmsrun`` does."""
    job = start(launcher, tmp_path, "wait")
    wait_until(lambda: len(names(tmp_path, "ready")) == 2, "the ranks are ready", 60)
    front = int((tmp_path / "pid").read_text())
    guard = only_child(front)
    for pid in (front, only_child(guard)):
        with suppress(ProcessLookupError):  # the guard, which sees the first go, was quicker with the other
            os.kill(pid, signal.SIGKILL)
    job.communicate(timeout=300)
    wait_until(lambda: has_ended(guard), "the guard is gone", 30)
    assert_nothing_left(tmp_path)


def has_ended(pid: int) -> bool:
    """Whether a process is gone, or waits for nothing but its parent's notice, which may be this process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def only_child(pid: int) -> int:
    (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(child)
