"""Convolutions with biases: oneDNN merges their gradients in the edited graph where it does in the other."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
JOB = Path(__file__).with_name("conv_bits_job.py")

pytestmark = pytest.mark.tensorflow


@pytest.mark.parametrize("legacy_keras", ["0", "1"])
def test_convolutions_with_biases_train_to_the_same_bits(legacy_keras: str) -> None:
    pytest.importorskip("tensorflow")
    done = subprocess.run(
        [sys.executable, str(JOB)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TF_USE_LEGACY_KERAS": legacy_keras},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for optimizer, (off, on, tensors) in json.loads(done.stdout.splitlines()[-1]).items():
        assert on == off and tensors > 5, optimizer
