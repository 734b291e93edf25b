"""Swapping under two real Horovod ranks: the ranks agree, and agree with training that does not swap."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.tensorflow, pytest.mark.ranks]

ROOT = Path(__file__).resolve().parents[2]
JOB = Path(__file__).with_name("hvd_swap_job.py")


def test_two_ranks_train_the_same_bits_with_and_without_swapping() -> None:
    if importlib.util.find_spec("horovod") is None:
        pytest.skip("Horovod is not installed here (scripts/setup.py builds it)")
    lmsrun = [sys.executable, str(ROOT / "lmsrun" / "__main__.py"), "run", "-np", "2", "--oversubscribe"]
    done = subprocess.run(
        [*lmsrun, "--no-lms", "--no-tag-output", str(JOB)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    ranks = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert sorted(rank["rank"] for rank in ranks) == [0, 1]
    assert all(rank["tensors"] and min(rank["tensors"]) > 5 for rank in ranks)
    assert len({rank[when] for rank in ranks for when in ("before", "after")}) == 1
