"""The example of the README: real scans, alone and on two bound ranks."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.tensorflow, pytest.mark.ranks, pytest.mark.extras]

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
        [sys.executable, "-c", source], env=ENVIRON, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 1, done.stderr[-2000:]
    assert re.search(r"^test accuracy 0\.\d{4}, loss [\d.]+, 359 images$", done.stdout, re.M), done.stdout
    assert done.stderr.rstrip().endswith("is below --min-accuracy 1.01")


def test_the_demo_runs_out_of_memory_and_then_learns() -> None:
    if importlib.util.find_spec("horovod") is None:
        pytest.skip("Horovod is not installed here (scripts/setup.py builds it)")
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "demo.py")],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr[-4000:]
    assert re.search(r"^  out of memory: .* \(exit code \d+, \d+ s\)$", done.stdout, re.M), done.stdout
    swapped = r"^  Large Model Support: \d+ tensors swapped, .* peak is ([\d.]+) MiB instead of ([\d.]+)$"
    peaks = re.search(swapped, done.stdout, re.M)
    assert peaks is not None and float(peaks[1]) <= 20 < float(peaks[2]), done.stdout
    last = re.search(r"^  test accuracy (0\.\d+|1\.0+), .* 2 ranks hold the same weights$", done.stdout, re.M)
    assert last is not None, done.stdout
    assert float(last[1]) >= 0.95
    assert len(done.stdout.splitlines()) < 20, done.stdout
    pages = {
        name: (ROOT / "out" / "demo" / f"{name}.html").read_text() for name in ("with-lms", "without-lms")
    }
    assert "Fits: " in pages["with-lms"] and "The job ended well." in pages["with-lms"]
    assert '<div class="verdict bad" role="status"><p>The job failed with code ' in pages["without-lms"]
    latest = ROOT / "out" / "demo" / "with-lms" / "latest"
    ranks = json.loads((latest / "receipts.json").read_text())["ranks"]
    assert [(rank["rank"], rank["lms"], rank["stages"]) for rank in ranks] == [
        (0, "graph", ["start", "framework", "init"]),
        (1, "graph", ["start", "framework", "init"]),
    ]


@pytest.mark.parametrize(
    ("log", "said"),
    [
        ("x ran out of memory trying to allocate 2.81MiB (rounded to 1)requested by op a/b/C\n", "2.81 MiB"),
        ("RESOURCE_EXHAUSTED: OOM when allocating tensor\n", "an allocation failed"),
        ("ImportError: no horovod\n", None),
    ],
)
def test_the_demo_believes_no_other_failure(
    log: str, said: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import demo

    monkeypatch.setattr(demo, "ROOT", tmp_path)
    (tmp_path / "rank-1.stderr").write_text(log)
    if said is None:
        with pytest.raises(demo.DemoError, match="not for lack of memory"):
            demo.what_was_lacking(tmp_path)
    else:
        assert demo.what_was_lacking(tmp_path).startswith(said)
