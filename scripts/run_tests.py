"""Run all tests, in two processes at once where the machine has room: most of ``lms/``, and the others.

The first mostly compute, the others mostly wait for launchers, guests and containers; the longest of ``lms/``
are with them, so that both take about as long. With arguments it is plain ``pytest``, in one process.

    python scripts/run_tests.py
    python scripts/run_tests.py tests/launch -k receipts
"""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FIRST, BUT, BESIDE = "lms", "bits", "gpu"
"""The folder of ``tests/`` that the first process runs, the folder in it that the second does, and another
folder for the first."""
LEAST_CPUS, LEAST_BYTES = 2, 6 << 30
INTERRUPTED = 2
"""The exit code of a pytest that was interrupted."""


def shards(tests: Path) -> tuple[list[str], list[str]]:
    """Share the folders and files of tests out to the two processes."""
    first = [path for path in _homes(tests / FIRST) if path.name != BUT]
    second = [path for path in _homes(tests) if path.name not in (FIRST, BESIDE)]
    return [*map(str, first), str(tests / BESIDE)], [str(path) for path in (*second, tests / FIRST / BUT)]


def _homes(folder: Path) -> list[Path]:
    """Return what lies in a folder and is a test, or holds some."""
    return [
        path for path in sorted(folder.iterdir()) if path.match("test_*.py") or any(path.rglob("test_*.py"))
    ]


def has_room() -> bool:
    """Tell whether two processes of tests have room on this machine."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return len(os.sched_getaffinity(0)) >= LEAST_CPUS and memory >= LEAST_BYTES


def main(argv: Sequence[str]) -> int:
    """Run the tests; returns the exit code of the process that failed, or 0."""
    pytest = [sys.executable, "-m", "pytest"]
    if argv or not has_room():
        os.execv(sys.executable, [*pytest, *argv])  # noqa: S606 - no shell is meant
    first, second = shards(ROOT / "tests")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryFile() as kept:
        running: list[subprocess.Popen[bytes]] = []
        try:
            print("tests: two processes; the output of the second comes at the end")
            sys.stdout.flush()
            running.append(subprocess.Popen([*pytest, *second], stdout=kept, stderr=kept, cwd=ROOT))
            running.append(subprocess.Popen([*pytest, *first], cwd=ROOT))
            codes = [one.wait() for one in reversed(running)]
        except KeyboardInterrupt:
            for one in running:
                one.send_signal(signal.SIGINT)
            codes = [*(one.wait() for one in running), INTERRUPTED]
        kept.seek(0)
        sys.stdout.flush()
        while chunk := kept.read(1 << 20):
            sys.stdout.buffer.write(chunk)
    sys.stdout.flush()
    return max(abs(code) for code in codes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
