"""The tests' own ground: what a run of them inherits must not decide how they end."""

import signal
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__)
ENDING = (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGTERM)


def test_jobs_of_the_tests_meet_default_signals() -> None:
    """Also the part of the next test that runs where they are ignored."""
    done = subprocess.run(
        ["grep", "^SigIgn", "/proc/self/status"], capture_output=True, text=True, check=True, timeout=10
    )
    ignored = int(done.stdout.split()[1], 16)
    assert [number for number in ENDING if ignored >> (number - 1) & 1] == []


def test_in_a_run_that_ignores_them_too() -> None:
    def ignore() -> None:
        for number in ENDING:
            signal.signal(number, signal.SIG_IGN)

    name = f"{HERE}::{test_jobs_of_the_tests_meet_default_signals.__name__}"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", name]
    done = subprocess.run(command, preexec_fn=ignore, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout
