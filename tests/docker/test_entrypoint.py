"""The containers' entrypoint, run for real with a stand-in for lmsrun."""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from lmsrun.options import COMMANDS, FOR_LMSRUN

ENTRYPOINT = Path(__file__).resolve().parents[2] / "docker" / "entrypoint.sh"


ECHO = '#!/bin/sh\nprintf "<%s>" lmsrun "$@"\n'


def entrypoint(
    tmp_path: Path, *argv: str, lmsrun: str = ECHO, **environ: str
) -> subprocess.CompletedProcess[str]:
    """Run the entrypoint with a stand-in for ``lmsrun``, by default one that prints its arguments."""
    program = tmp_path / "lmsrun"
    program.write_text(lmsrun)
    program.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        [str(ENTRYPOINT), *argv],
        env={"HOME": str(tmp_path), "PATH": path, **environ},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ((), "<lmsrun><check>"),
        (("-np", "2", "train.py", "a b;$(id)"), "<lmsrun><-np><2><train.py><a b;$(id)>"),
        (("train.py",), "<lmsrun><train.py>"),
        (("plan", "--json", "t.py"), "<lmsrun><plan><--json><t.py>"),
        (("echo", "a  b", "*"), "a  b *\n"),
    ],
)
def test_arguments_become_a_run(tmp_path: Path, argv: tuple[str, ...], said: str) -> None:
    done = entrypoint(tmp_path, *argv)
    assert (done.returncode, done.stdout) == (0, said), done.stderr


@pytest.mark.parametrize("command", sorted(COMMANDS.keys() - set(FOR_LMSRUN)))
def test_every_command_of_lmsrun_is_one_of_the_container(tmp_path: Path, command: str) -> None:
    done = entrypoint(tmp_path, command, "x")
    assert (done.returncode, done.stdout) == (0, f"<lmsrun><{command}><x>"), done.stderr


@pytest.mark.parametrize("is_own", [True, False])
def test_sshd_takes_the_keys_that_are_named(tmp_path: Path, is_own: bool) -> None:
    """A file beside the one that sshd reads is copied; that one itself may be named, too."""
    folder = tmp_path / ".ssh"
    folder.mkdir()
    (folder / "host_key").touch()
    named = folder / "authorized_keys" if is_own else tmp_path / "keys"
    named.write_text("ssh-ed25519 AAAA\n")
    script = tmp_path / "entrypoint.sh"
    script.write_text(ENTRYPOINT.read_text().replace("/usr/sbin/sshd", "echo sshd"))
    done = subprocess.run(
        ["sh", str(script), "sshd"],
        env={"HOME": str(tmp_path), "PATH": os.environ["PATH"], "AUTHORIZED_KEYS": str(named)},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0 and done.stdout.startswith("sshd -D "), done.stderr
    assert (folder / "authorized_keys").read_text() == "ssh-ed25519 AAAA\n"


def as_nobody(tmp_path: Path, *argv: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run the entrypoint as a user without name, home and privileges; only root can become one."""
    if os.geteuid() != 0:
        pytest.skip("root can become another user")
    for folder in (tmp_path, *tmp_path.parents[:-1]):
        folder.chmod(folder.stat().st_mode | 0o011)
    script = tmp_path / "entrypoint.sh"
    shutil.copy(ENTRYPOINT, script)
    words = ["setpriv", "--reuid=54321", "--regid=54321", "--clear-groups", str(script), *argv]
    return subprocess.run(
        words,
        env={"PATH": os.environ["PATH"], **environ},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def test_a_user_without_home_and_name_gets_both(tmp_path: Path) -> None:
    show = 'touch "$HOME/x" && printf "%s\n" "$HOME" "$LOGNAME" && rm -r "$HOME"'
    done = as_nobody(tmp_path, "sh", "-c", show, HOME="/nonexistent")
    home, name = done.stdout.split()
    assert home.startswith("/tmp/home.") and name == "uid-54321", done.stderr


def test_where_only_shared_memory_can_be_written(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o755)
    done = as_nobody(tmp_path, "sh", "-c", 'echo "$TMPDIR $HOME"; rmdir "$HOME"', TMPDIR=str(closed))
    place, home = done.stdout.split()
    assert place == "/dev/shm" and home.startswith("/dev/shm/home."), done.stderr


@pytest.mark.parametrize("value", ["a b", "'", '"', "a\nb", "$(id)", "*", "\\", ""])
def test_values_of_variables_reach_lmsrun_as_they_are(tmp_path: Path, value: str) -> None:
    done = entrypoint(tmp_path, "run", "x.py", lmsrun="#!/bin/sh\nexec env -0\n", LMSRUN_FORWARD=value)
    assert dict(each.split("=", 1) for each in done.stdout.split("\0") if each)["LMSRUN_FORWARD"] == value


def test_the_job_takes_the_place_of_the_entrypoint(tmp_path: Path) -> None:
    """So that a signal to the container reaches the job itself, and its exit code is the container's."""
    job = subprocess.Popen(
        [
            str(ENTRYPOINT),
            "sh",
            "-c",
            "trap 'exit 42' TERM; touch $READY; while :; do sleep 0.05; done",
        ],
        env={"HOME": str(tmp_path), "PATH": os.environ["PATH"], "READY": str(tmp_path / "ready")},
    )
    try:
        end = time.monotonic() + 300
        while not (tmp_path / "ready").exists() and time.monotonic() < end:
            time.sleep(0.02)
        job.send_signal(signal.SIGTERM)
        assert job.wait(300) == 42
    finally:
        job.kill()
        job.wait()
