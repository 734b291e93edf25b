"""Output: how long lines of two ranks take through lmsrun and through mpirun, and whether they arrive whole.

    python bench/output.py [--ranks 2] [--megabytes 50] [--repeat 3] [--json FILE]

Every rank writes numbered lines of 80 bytes as fast as it can; the reader at the other end of the pipe checks
that each line is whole and that those of a rank come in order. The launchers take turns, so that the
machine's mood hits all alike; their own start counts.
"""

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = """\
import os, sys
rank = next(os.environ[name] for name in ("OMPI_COMM_WORLD_RANK", "RANK") if name in os.environ)
pad = "x" * 62
for first in range(0, int(sys.argv[1]) * 12_500, 100):
    sys.stdout.write("".join(f"<{rank} {line:012d} {pad}>\\n" for line in range(first, first + 100)))
"""
LINE = re.compile(rb"<(\d+) (\d{12}) x{62}>\n")
_LIMIT_S = 600


def launchers(ranks: int) -> dict[str, list[str]]:
    """Build the command of each launcher that is here, but for the program."""
    entry = [sys.executable, str(ROOT / "lmsrun" / "__main__.py"), "-np", str(ranks), "--oversubscribe"]
    found = {"lmsrun": [*entry, "--no-lms"], "lmsrun, no tags": [*entry, "--no-lms", "--no-tag-output"]}
    mpirun = shutil.which("mpirun")
    if mpirun:
        root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
        plain = [mpirun, *root, "--oversubscribe", "-np", str(ranks)]
        found["lmsrun, by mpirun"] = [*entry, "--no-lms", "--launcher", "mpirun", *root]
        found |= {"mpirun": plain, "mpirun, tags": [*plain, "--tag-output"]}
    return found


def measure(argv: list[str], ranks: int, megabytes: int) -> tuple[float, str]:
    """Seconds from the command to the end of its output, and what was wrong with the lines."""
    started = time.monotonic()
    with subprocess.Popen(
        [*argv, sys.executable, "-c", SCRIPT, str(megabytes)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as job:
        assert job.stdout is not None
        pieces = []
        while piece := job.stdout.read1(1 << 20):
            pieces.append(piece)
        code = job.wait(_LIMIT_S)
    taken = time.monotonic() - started
    if code != 0:
        raise SystemExit(f"{argv[0]} ended with {code}")
    return taken, find_fault(b"".join(pieces), ranks, megabytes)


def find_fault(output: bytes, ranks: int, megabytes: int) -> str:
    """Find what is wrong with the lines that came; empty when nothing is."""
    due = dict.fromkeys(range(ranks), 0)
    whole = 0
    for rank, line in _numbers(output):
        whole += 1
        if due[rank] != line:
            return f"rank {rank} was to write line {due[rank]}, found {line}"
        due[rank] += 1
    wanted = ranks * megabytes * 12_500
    mixed = output.count(b"\n") - whole
    return f"{mixed} lines of {wanted} mixed" if mixed or whole != wanted else ""


def _numbers(output: bytes) -> Iterable[tuple[int, int]]:
    return ((int(found[1]), int(found[2])) for found in LINE.finditer(output))


def main() -> int:
    """Print a table; exits with 1 where lmsrun is slower than mpirun or its lines are not whole."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--megabytes", type=int, default=50)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    times: dict[str, list[float]] = {}
    faults: dict[str, str] = {}
    commands = launchers(chosen.ranks)
    for _ in range(chosen.repeat):
        for name, argv in commands.items():
            taken, fault = measure(argv, chosen.ranks, chosen.megabytes)
            times.setdefault(name, []).append(taken)
            faults[name] = faults.get(name) or fault
    medians = {name: statistics.median(taken) for name, taken in times.items()}
    for name, median in medians.items():
        speed = chosen.ranks * chosen.megabytes / median
        print(f"{name:<18} {median:7.2f} s {speed:7.0f} MB/s  {faults[name] or 'lines whole, in order'}")
    if chosen.json:
        chosen.json.write_text(json.dumps({"seconds": times, "faults": faults}, indent=2) + "\n")
    slower = "mpirun" in medians and medians["lmsrun"] > medians["mpirun"]
    return 1 if slower or faults["lmsrun"] else 0


if __name__ == "__main__":
    sys.exit(main())
