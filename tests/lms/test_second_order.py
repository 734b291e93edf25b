"""A tape in a tape: the same bits, but where TensorFlow's own sum depends on the order of the ops."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
JOB = Path(__file__).with_name("second_order_job.py")

pytestmark = pytest.mark.tensorflow


def run_job(*arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(JOB), *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_second_order_gradients() -> None:
    pytest.importorskip("tensorflow")
    seen = run_job()
    assert all(tensors > 10 for _, _, tensors in seen.values())
    for step in ("hessian_product", "after_a_step"):
        off, on, _ = seen[step]
        assert on == off, step
    off, on, _ = (
        np.frombuffer(bytes.fromhex(text), np.float32) if isinstance(text, str) else text
        for text in seen["gradient_penalty"]
    )
    np.testing.assert_allclose(on, off, atol=1e-6)


def test_sums_in_a_fixed_order_are_the_same_to_the_bit() -> None:
    """What differs in a gradient penalty is AddN's choice of the input to start with, and nothing else."""
    pytest.importorskip("tensorflow")
    for step, (off, on, tensors) in run_job("chained").items():
        assert on == off and tensors > 10, step
