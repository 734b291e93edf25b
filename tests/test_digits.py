"""The example of the README: real scans, alone and on two bound ranks."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.tensorflow, pytest.mark.ranks]

ROOT = Path(__file__).resolve().parents[1]
DIGITS = ROOT / "examples" / "train_digits.py"
ENVIRON = {**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"}
WITHOUT_HOROVOD = """
import runpy, sys
sys.modules["horovod"] = None
sys.argv = ["train_digits.py", "--epochs", "1", "--min-accuracy", "1.01"]
runpy.run_path({path!r}, run_name="__main__")
"""


def test_alone_without_horovod_and_below_the_stated_accuracy() -> None:
    source = WITHOUT_HOROVOD.format(path=str(DIGITS))
    done = subprocess.run(
        [sys.executable, "-c", source], env=ENVIRON, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1, done.stderr[-2000:]
    assert re.search(r"^test accuracy 0\.\d{4}, loss [\d.]+, 359 images$", done.stdout, re.M), done.stdout
    assert done.stderr.rstrip().endswith("is below --min-accuracy 1.01")


def test_two_ranks_reach_the_stated_accuracy_with_equal_weights(tmp_path: Path) -> None:
    if importlib.util.find_spec("horovod") is None:
        pytest.skip("Horovod is not installed here (scripts/setup.py builds it)")
    lmsrun = [sys.executable, str(ROOT / "lmsrun" / "__main__.py"), "run", "-np", "2", "--oversubscribe"]
    done = subprocess.run(
        [*lmsrun, "--no-tag-output", "--output-dir", str(tmp_path), str(DIGITS)],
        env=ENVIRON,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    last = re.search(r"^test accuracy (0\.\d+|1\.0+), .* 2 ranks hold the same weights$", done.stdout, re.M)
    assert last is not None, done.stdout
    assert float(last[1]) >= 0.95
    ranks = json.loads((tmp_path / "latest" / "receipts.json").read_text())["ranks"]
    assert [(rank["rank"], rank["lms"], rank["stages"]) for rank in ranks] == [
        (0, "graph", ["start", "framework", "init"]),
        (1, "graph", ["start", "framework", "init"]),
    ]
