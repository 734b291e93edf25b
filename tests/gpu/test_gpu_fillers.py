"""Fillers on a GPU: what they take there, and a step that is planned with them."""

from pathlib import Path

import pytest
import stand_in

pytestmark = pytest.mark.tensorflow

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20


def test_a_filler_takes_what_the_device_would_give_beyond_what_is_asked_for() -> None:
    job = ROOT / "tests/lms/simulate/filler_job.py"
    seen = stand_in.run([str(job)], {"SIMGPU_MEMORY_MB": "64", "PYTHONPATH": str(ROOT)}).found
    assert abs(seen["taken"] - seen["simulated"]) <= 1024, "what rounding may add"
    assert abs(seen["peak"] - seen["simulated peak"]) <= 1024
    assert seen["simulated"] > 8 * MIB
    assert seen["given"] < seen["given without"] - 8 * MIB
    assert seen["nothing"] == seen["too large"] == 0


def test_a_step_with_fillers_trains_to_the_same_bits() -> None:
    job = ROOT / "tests/lms/engine/filled_job.py"
    environ = {"SIMGPU_MEMORY_MB": "200", "PYTHONPATH": str(ROOT)}
    plain, filled = (stand_in.run([str(job), limit], environ).found for limit in ("0", "8"))
    assert filled["fillers"] > 0 < filled["swaps"]
    assert filled["digest"] == plain["digest"]
