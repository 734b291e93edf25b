"""One fault of ``bench/faults.py``, and its table."""

import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench" / "faults.py"


@pytest.mark.ranks
def test_a_fault_is_done_again_by_its_name() -> None:
    argv = [sys.executable, str(BENCH), "--replay", "1/local/kill/0"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| a rank is killed | 1 of 1 |" in done.stdout
