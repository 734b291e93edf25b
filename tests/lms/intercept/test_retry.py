"""First steps that run out of memory are tried again with the batches and the state of the first try."""

import ast
import os
import re
import subprocess
from functools import cache
from pathlib import Path

import pytest
import warm_python

ROOT = Path(__file__).resolve().parents[3]
JOB = Path(__file__).with_name("retry_job.py")

pytestmark = pytest.mark.tensorflow


def _cases(group: str) -> list[str]:
    for node in ast.parse(JOB.read_text(encoding="utf-8")).body:
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and node.targets[0].id == group
        ):
            return [one.id for one in node.value.elts]  # type: ignore[attr-defined]
    raise AssertionError(f"no {group}")


@cache
def _done(kind: str, legacy_keras: str) -> "subprocess.CompletedProcess[str]":
    environ = {"PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3", "TF_USE_LEGACY_KERAS": legacy_keras}
    return warm_python.run([str(JOB), kind], {**os.environ, **environ}, timeout_s=600)


def _require(case: str, done: "subprocess.CompletedProcess[str]") -> None:
    assert f"held: {case}" in done.stdout.splitlines(), done.stderr[-4000:]


@pytest.mark.parametrize("legacy_keras", ["0", "1"])
@pytest.mark.parametrize("case", _cases("KERAS_CASES"))
def test_keras(case: str, legacy_keras: str) -> None:
    pytest.importorskip("tensorflow")
    if legacy_keras == "1":
        pytest.importorskip("tf_keras")
    _require(case, _done("keras", legacy_keras))


@pytest.mark.parametrize("case", _cases("LOOP_CASES"))
def test_loop(case: str) -> None:
    pytest.importorskip("tensorflow")
    _require(case, _done("loops", "0"))


HOPELESS = """
import tensorflow as tf
import lms

lms.enable(policy="auto")
weights = tf.Variable(tf.ones((2048, 2048)))

@tf.function
def step():
    with tf.GradientTape() as tape:
        x = weights
        for _ in range(4):
            x = tf.tanh(x @ weights)
        loss = tf.reduce_sum(x)
    weights.assign_sub(1e-3 * tape.gradient(loss, weights))
    return loss

step()
"""


def test_a_step_that_no_plan_fits_is_tried_once_more_with_all() -> None:
    pytest.importorskip("tensorflow")
    limit = {"TF_CPU_ALLOCATOR_USE_BFC": "true", "TF_CPU_BFC_MEM_LIMIT_IN_MB": "50"}
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3", **limit}
    done = warm_python.run(["-c", HOPELESS], environ, timeout_s=300)
    assert done.returncode == 1
    assert "is not met" in done.stderr, "told before the step"
    again = re.findall("ran out of memory(.*); planned again with (.*)", done.stderr)
    assert again == [("", "policy all instead of auto")]
    assert "take a smaller batch, or a device with more memory" in done.stderr
