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
        ["grep", "^SigIgn", "/proc/self/status"], capture_output=True, text=True, check=True, timeout=300
    )
    ignored = int(done.stdout.split()[1], 16)
    assert [number for number in ENDING if ignored >> (number - 1) & 1] == []


def test_in_a_run_that_ignores_them_too() -> None:
    def ignore() -> None:
        for number in ENDING:
            signal.signal(number, signal.SIG_IGN)

    name = f"{HERE}::{test_jobs_of_the_tests_meet_default_signals.__name__}"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", name]
    done = subprocess.run(command, preexec_fn=ignore, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout


def test_several_processes_share_tests_by_files_and_by_folders_that_need_the_machine_for_themselves(
    tmp_path: Path,
) -> None:
    files = ("docker/test_a.py", "docker/test_b.py", "other/test_c.py", "other/test_d.py", "test_e.py")
    for name in files:
        file = tmp_path / "tests" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(f"def test_{name}(): pass\n" for name in ("one", "two", "three")))
    (tmp_path / "tests" / "conftest.py").symlink_to(HERE.parent / "conftest.py")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    options = ["-v", "-n", "2", "--dist", "loadfile", "-p", "no:cacheprovider", "-p", "no:hypothesispytest"]
    command = [sys.executable, "-m", "pytest", *options, "--rootdir", str(tmp_path), "tests"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False)
    assert f"{3 * len(files)} passed" in done.stdout, done.stdout
    homes: dict[str, set[str]] = {}
    for worker, path in re.findall(r"\[(gw\d)\].* tests/(\S+\.py)::", done.stdout):
        homes.setdefault(path.partition("/")[0] if path.startswith("docker/") else path, set()).add(worker)
    assert all(len(workers) == 1 for workers in homes.values()), homes
    assert sorted(homes) == ["docker", *files[2:]]
    assert {worker for one in homes.values() for worker in one} == {"gw0", "gw1"}
