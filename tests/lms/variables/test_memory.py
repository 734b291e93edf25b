"""What the device holds before a step begins, and through all of it: what no swap can send away."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import warm_python

ROOT = Path(__file__).resolve().parents[3]
JOB = Path(__file__).with_name("memory_job.py")

pytestmark = pytest.mark.tensorflow


def run(case: str, legacy: str = "0") -> dict[str, Any]:
    pytest.importorskip("tensorflow")
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TF_USE_LEGACY_KERAS": legacy}
    done = warm_python.run([str(JOB), case], env, timeout_s=300)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_changed_variables_that_share_a_buffer_get_their_own() -> None:
    """Of four that share one, two frozen ones keep it, and no value changes."""
    found = run("shared")
    assert found.pop("grown") >= 128  # chunks may have more
    assert found == {"again": 0, "same": True, "reads share": True}


def test_a_tensor_of_texts_or_objects_has_no_address() -> None:
    """TensorFlow ends the process where somebody asks for it."""
    assert run("objects") == {"addresses": [None, None, None], "of numbers": True}


def test_a_step_in_another_thread_loses_no_update() -> None:
    """Between the ops of LMS it writes to the variable that is given memory of its own."""
    found = run("raced")
    assert found["interruptions"] >= 2 and found["lost"] == 0


@pytest.mark.parametrize("legacy", ["0", "1"])
def test_the_base_of_a_plan_is_what_lies_there_after_the_step(legacy: str) -> None:
    """Of 14 MiB 5 are momenta that begin as one tensor, and 3 constants of the loss; chunks have more."""
    found = run("trained", legacy)
    assert found["planned"] == pytest.approx(found["counted"], rel=0.1)
