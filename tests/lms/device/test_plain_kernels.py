"""A step with TensorFlow's own kernels takes the memory that is planned for it, under a real limit."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CASE = Path(__file__).resolve().parents[3] / "bench" / "lms_case.py"
LIMIT_MB = 600


@pytest.mark.tensorflow
def test_a_network_of_3d_convolutions_takes_what_is_planned() -> None:
    """Most of it is what their gradients unfold: without that a seventh was planned."""
    pytest.importorskip("tensorflow")
    case = {"model": "unet3d-plain", "units": 2, "policy": "all", "limit_mb": LIMIT_MB}
    environ = {
        "TF_ENABLE_ONEDNN_OPTS": "0",
        "TF_CPU_ALLOCATOR_USE_BFC": "true",
        "TF_CPU_BFC_MEM_LIMIT_IN_MB": str(LIMIT_MB),
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    done = subprocess.run(
        [sys.executable, CASE, json.dumps({"zoo": "small", **case})],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["measured_peak_bytes"] == pytest.approx(found["planned_peak_bytes"], rel=0.1)
