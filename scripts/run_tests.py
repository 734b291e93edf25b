"""Run all tests, in several processes at once where the machine has room.

There is one process more than processors, for many tests wait for launchers, guests and timeouts. All tests
of a file run in one process, and so do those of a folder that needs something of which a machine has one;
``tests/conftest.py`` says which. With arguments it is plain ``pytest``, in one process.

    python scripts/run_tests.py
    python scripts/run_tests.py tests/launch -k receipts
"""

import os
import sys
from collections.abc import Sequence

BYTES_EACH = 4 << 30
"""The memory that a process of tests needs with what it starts."""


def processes(cpus: int, memory: int) -> int:
    """Return how many processes of tests have room on a machine with this memory in bytes."""
    return max(1, min(cpus + 1, memory // BYTES_EACH))


def main(argv: Sequence[str]) -> None:
    """Become pytest, with the given arguments or else with all tests."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    number = processes(len(os.sched_getaffinity(0)), memory)
    everything = ["-n", str(number), "--dist", "loadfile", "--no-loadscope-reorder"] if number > 1 else []
    os.execv(sys.executable, [sys.executable, "-m", "pytest", *(argv or everything)])  # noqa: S606


if __name__ == "__main__":
    main(sys.argv[1:])
