"""Conditions that a session feeds, on a GPU: what a branch makes is swapped, to the same bits."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import stand_in

pytestmark = pytest.mark.tensorflow

ROOT = Path(__file__).resolve().parents[2]
JOB = ROOT / "tests/lms/specialiser/branches_job.py"
ACTIVATION = 8 * 16 * 16 * 32 * 4
CASES = {"batch norm": 4, "dropout": 6, "both ways": 8, "computed": 6, "callable": 8}
"""By case how many activations its step may need: of five layers, which keep two or more each."""


@cache
def seen(control_flow: str, mode: str) -> dict[str, Any]:
    """Run the job on the stand-in."""
    environ = {"SIMGPU_MEMORY_MB": "256", "PYTHONPATH": str(ROOT)}
    found: dict[str, Any] = stand_in.run([str(JOB), control_flow, mode], environ).found
    return found


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("control_flow", ["v1", "v2"])
def test_a_fed_condition_costs_no_memory(control_flow: str, case: str) -> None:
    plain, found = seen(control_flow, "plain")[case], seen(control_flow, "lms")[case]
    assert found["bits"] == plain["bits"]
    assert found["step"] <= CASES[case] * ACTIVATION
    assert not found["warnings"]
