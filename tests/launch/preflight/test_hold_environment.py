"""A job's environment on another host: there for as long as it is wanted, whatever ends that."""

import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from launch.model.errors import JobError
from launch.model.plan import SHIM
from launch.preflight.hold_environment import endings_raised, hold_environment

SSH = """#!/bin/sh
while [ "$1" != -- ]; do shift; done
[ "$2" = far ] || { echo "ssh: connect to host $2 port 22: Connection refused" >&2; exit 255; }
echo Welcome to far
exec sh -c "$3"
"""
"""A shell on a host called far; what ssh itself does, ``tests/cluster/test_real_ssh.py`` sees."""


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ssh").write_text(SSH)
    (tmp_path / "bin" / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    return tmp_path / "lmsrun-files-a b" / "environment"


def wait_until_gone(folder: Path) -> None:
    end = time.monotonic() + 300
    while folder.exists():
        assert time.monotonic() < end, f"{folder} stays"
        time.sleep(0.02)


def test_the_file_is_private_and_goes_with_the_job(path: Path) -> None:
    with hold_environment(["far"], str(path), '{"TOKEN": "t"}', 30):
        assert path.read_text() == '{"TOKEN": "t"}'
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert not path.parent.exists()


def test_hosts_that_share_the_folder_share_the_file(path: Path) -> None:
    with (
        hold_environment(["far", "far"], str(path), "{}", 30),
        hold_environment(["far"], str(path), "{}", 30),
    ):
        assert path.read_text() == "{}"
    wait_until_gone(path.parent)
    own = psutil.Process().pid
    left = [one.info for one in psutil.process_iter(["ppid", "cmdline"])]  # a zombie of another test has none
    assert not [one for one in left if one["ppid"] == own and str(path) in (one["cmdline"] or ())], left


@pytest.mark.parametrize(
    ("host", "said"),
    [("near", "near: ssh: connect to host near port 22: Connection refused"), ("far", "is there already")],
)
def test_a_host_that_cannot_have_it_is_named(path: Path, host: str, said: str) -> None:
    path.parent.mkdir()
    path.write_text("another job's")
    with (
        pytest.raises(JobError, match=f"cannot hand the environment to {host}.*{said}|{said}"),
        hold_environment([host], str(path), "{}", 30),
    ):
        pass
    assert path.read_text() == "another job's"


def test_it_goes_with_a_job_that_is_killed(path: Path) -> None:
    code = (
        "import os, sys; from launch.preflight.hold_environment import hold_environment\n"
        "with hold_environment(['far'], sys.argv[1], '{}', 30): os.kill(os.getpid(), 9)"
    )
    environ = {**os.environ, "PYTHONPATH": str(SHIM.parents[1])}
    done = subprocess.run([sys.executable, "-c", code, str(path)], env=environ, timeout=300, check=False)
    assert done.returncode == -9
    wait_until_gone(path.parent)


def test_what_is_no_environment_is_refused() -> None:
    argv = [sys.executable, str(SHIM), "hold-environment", "/nowhere/environment"]
    done = subprocess.run(argv, input=b"", capture_output=True, timeout=300, check=False)
    assert (done.returncode, done.stderr.count(b"\n")) == (2, 1)


def test_a_signal_to_end_is_an_exception_while_hosts_are_asked() -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with pytest.raises(SystemExit) as caught, endings_raised():
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)
        assert caught.value.code == 128 + signal.SIGTERM
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)
