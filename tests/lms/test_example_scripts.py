"""Each example runs by itself, on the TensorFlow that the tests run on."""

import re
import sys
from pathlib import Path

import pytest
from example_run import run

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.tensorflow, pytest.mark.extras]

ALONE = {
    "many_model.py": (
        "--model mobilenet --image_size 64 --batch_size 2 --steps 3 --lms --lms_stats --lms_stats_average "
        "--lms_stats_warmup_steps 1 --output_dir {tmp}"
    ),
    "unet3d.py": "--size 16 --depth 1 --filters 4 --epochs 1 --steps 30 --min-dice 0.8 --stats {tmp}/u.csv",
    "session_mnist.py": "--steps 60 --min-accuracy 0.85",
    "custom_loop.py": "--policy all --steps 12",
}


def moved_bytes(steps: Path) -> list[str]:
    """What each step of LMS_STATS_FILE swapped out: the same in all, and not nothing."""
    header, *lines = steps.read_text().splitlines()
    moved = [line.split(",")[header.split(",").index("bytes_out")] for line in lines]
    assert len(set(moved)) == 1, moved
    assert int(moved[0]) > 0
    return moved


@pytest.fixture(autouse=True)
def packages() -> None:
    for name in ("tensorflow", "sklearn", "nibabel"):
        pytest.importorskip(name)


@pytest.mark.parametrize("name", ALONE)
def test_alone(name: str, tmp_path: Path) -> None:
    steps = tmp_path / "steps.csv"
    argv = [sys.executable, f"examples/{name}", *ALONE[name].format(tmp=tmp_path).split()]
    text = run(argv, LMS_STATS_FILE=str(steps))
    if name == "many_model.py":
        header, first, *_ = (tmp_path / "mobilenet_lms_stats.csv").read_text().splitlines()
        assert header == "step type,epoch,step,duration,allocs,reclaimOnes,reclaimAlls,GiB reclaimed"
        assert first.startswith("t,0,0,")
        assert (
            (tmp_path / "mobilenet_lms_stats_average.csv").read_text().startswith("image_size,megapixels/sec")
        )
    if name == "unet3d.py":
        assert "on the second take, 16^3 voxels" in text
        assert "median megavoxels/sec" in (tmp_path / "u.csv").read_text()
    if name == "session_mnist.py":
        assert "[LMS][0] Added " in text
        assert len(moved_bytes(steps)) == 60
    if name == "custom_loop.py":
        assert "graphs edited     1" in text
        assert len(moved_bytes(steps)) == 12


def test_one_thread_keeps_to_the_plan_too() -> None:
    """It comes last to what nobody waits for."""
    argv = [sys.executable, "examples/custom_loop.py", *ALONE["custom_loop.py"].split()]
    limited = {"TF_CPU_ALLOCATOR_USE_BFC": "true", "TF_CPU_BFC_MEM_LIMIT_IN_MB": "400"}
    text = run(argv, TF_NUM_INTEROP_THREADS="1", **limited)
    found = re.search(r"measured peak .*\(([+-][\d.]+)% against planned\)", text)
    assert found and abs(float(found[1])) < 10, text
