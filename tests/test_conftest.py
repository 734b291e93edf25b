"""The tests' own ground: what a run of them inherits must not decide how they end."""

import re
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


def test_several_processes_share_tests_by_files_and_by_folders_that_need_the_machine_for_themselves() -> None:
    alone = [f"docker/{name}.py" for name in ("test_container_files", "test_templates")]
    chosen = [str(HERE.parent / one) for one in ("launch/model", *alone)]
    options = ["-v", "-n", "2", "--dist", "loadfile", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, *chosen]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    homes: dict[str, set[str]] = {}
    for worker, path in re.findall(r"\[(gw\d)\].* \S*tests/(\S+\.py)::", done.stdout):
        homes.setdefault("docker" if path in alone else path, set()).add(worker)
    assert all(len(workers) == 1 for workers in homes.values()), homes
    assert "docker" in homes and len(homes) > 2
    assert {worker for one in homes.values() for worker in one} == {"gw0", "gw1"}
