"""Running lmsrun from tests, and looking for what a job left behind."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
LMSRUN = HERE.parents[1] / "lmsrun" / "__main__.py"
SHOW_RANK = HERE / "show_rank.py"
TRAIN_SUM = HERE / "train_sum.py"


def needs(*programs: str) -> None:
    """Skip where a program is not installed."""
    for program in programs:
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed here")


def lmsrun(*argv: str) -> list[str]:
    """The command line of this checkout's lmsrun."""
    return [sys.executable, str(LMSRUN), *argv]


def run(
    argv: Sequence[str], cwd: Path, environ: Mapping[str, str] | None = None, timeout_s: float = 120
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, in an environment without options of lmsrun and without a batch job."""
    return subprocess.run(
        list(argv),
        cwd=cwd,
        env={**clean_environ(), **(environ or {})},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        stdin=subprocess.DEVNULL,
        check=False,
    )


def clean_environ() -> dict[str, str]:
    """This environment without what would change a job."""
    prefixes = ("LMSRUN_", "LMS_", "SLURM_", "OMPI_", "PMI", "HOROVOD_", "LSB_", "PBS_", "PYTHONUNBUFFERED")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(prefixes)}
    # Several ranks on two cores: Open MPI's busy waiting would starve the tests beside these.
    busy = {"OMPI_MCA_mpi_yield_when_idle": "1", "LMSRUN_PROBE_TIMEOUT": "60"}
    return {**kept, **busy, "TF_CPP_MIN_LOG_LEVEL": "2"}


def read_ranks(out: Path, ranks: int) -> list[dict[str, Any]]:
    """What ``show_rank.py`` wrote down, in rank order."""
    return [json.loads((out / f"rank-{rank}.json").read_text()) for rank in range(ranks)]


def digest_of(ranks: int) -> str:
    """The weights that ``train_sum.py`` ends with; all of its sums are exact."""
    np = pytest.importorskip("numpy")
    weights = np.zeros(4)
    for step in range(5):
        data = [np.array([rank + 1.0, step, 2.0, -1.0]) for rank in range(ranks)]
        weights -= 0.125 * sum(2 * (weights - each) for each in data)
    return hashlib.sha256(weights.tobytes()).hexdigest()[:16]


def processes_with(text: str) -> list[int]:
    """Processes whose command line holds ``text``, after giving them a moment to go."""
    end = time.monotonic() + 30
    while (found := _processes_with(text)) and time.monotonic() < end:
        time.sleep(0.1)
    return found


def _processes_with(text: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if text.encode() in command:
                found.append(int(entry.name))
    return found
