"""``tf.distribute`` under lmsrun: real workers that learn real scans, with Large Model Support in each."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.tensorflow, pytest.mark.ranks, pytest.mark.extras]

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "strategy_digits.py"
LMSRUN = [sys.executable, str(ROOT / "lmsrun" / "__main__.py"), "run", "-np", "2", "--oversubscribe"]
ALONE = """
import json, os, tensorflow as tf
os.environ.pop("TF_CONFIG", None)
print(tf.distribute.MultiWorkerMirroredStrategy().num_replicas_in_sync)
"""


def run(*argv: str, **environ: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name != "TF_CONFIG"}
    return subprocess.run(
        [*LMSRUN, *argv],
        env={**kept, "TF_CPP_MIN_LOG_LEVEL": "3", **environ},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_two_workers_learn_with_equal_weights(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    done = run("--lms", "--output-dir", str(tmp_path), str(EXAMPLE), LMS_POLICY="all")
    assert done.returncode == 0, done.stderr[-4000:]
    assert "lmsrun: framework: tensorflow (the script uses its strategy)" in done.stderr
    last = re.search(r"test accuracy (\d\.\d+), 359 images, 2 workers hold the same weights", done.stdout)
    assert last is not None and float(last[1]) >= 0.95, done.stdout
    assert done.stderr.count("yes, also with its strategy made") == 2
    ranks = json.loads((tmp_path / "latest" / "receipts.json").read_text())["ranks"]
    assert [(rank["lms"], rank["met_by"]) for rank in ranks] == [("graph", "tensorflow")] * 2


def test_workers_that_train_apart_are_told(tmp_path: Path) -> None:
    (tmp_path / "alone.py").write_text(ALONE)
    done = run("--no-lms", "--framework", "horovod", str(tmp_path / "alone.py"))
    assert done.returncode == 0, done.stderr[-4000:]
    told = "NO: MultiWorkerMirroredStrategy counts 1 rank with its strategy made, started 2; try --framework"
    assert done.stderr.count(told) == 2, done.stderr
