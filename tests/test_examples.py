"""Each example runs as two ranks under lmsrun, with real data where it has some; alone: tests/lms."""

import platform
import subprocess
import sys
from pathlib import Path

import pytest
from example_run import run

ROOT = Path(__file__).resolve().parents[1]
pytestmark = [pytest.mark.tensorflow, pytest.mark.extras]

RANKS = {
    "many_model.py": "--model mobilenet --image_size 32 --steps 2 --lms_stats --output_dir {tmp}",
    "unet3d.py": "--size 16 --depth 1 --filters 4 --epochs 1 --steps 10 --min-dice 0.5",
    "session_mnist.py": "--steps 30 --min-accuracy 0.7",
    "custom_loop.py": "--image-size 16 --blocks 2 --steps 12",
}


@pytest.fixture(autouse=True)
def packages() -> None:
    for name in ("tensorflow", "sklearn", "nibabel"):
        pytest.importorskip(name)


@pytest.mark.ranks
@pytest.mark.parametrize("name", RANKS)
def test_two_ranks(name: str, tmp_path: Path) -> None:
    pytest.importorskip("horovod")
    lmsrun = [sys.executable, "lmsrun/__main__.py", "run", "-np", "2", "--lms", f"examples/{name}"]
    text = run([*lmsrun, *RANKS[name].format(tmp=tmp_path).split()], LMS_POLICY="all")
    assert "also after hvd.init()" in text
    assert "[0]" in text
    if name == "many_model.py":
        files = sorted(path.name for path in tmp_path.iterdir())
        assert files == [f"mobilenet_lms_stats_{platform.node()}_gpu{rank}.csv" for rank in (0, 1)]


@pytest.mark.parametrize("name", ["train_digits.py", *RANKS])
def test_counts_below_one_are_refused(name: str) -> None:
    flag = "--epochs" if name == "train_digits.py" else "--steps"
    argv = [sys.executable, f"examples/{name}", flag, "0"]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].endswith(f"argument {flag}: 0 given; needed at least 1")
