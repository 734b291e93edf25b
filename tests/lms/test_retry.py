"""First steps that run out of memory are tried again with the batches and the state of the first try."""

import ast
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
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
    return subprocess.run(
        [sys.executable, str(JOB), kind],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TF_USE_LEGACY_KERAS": legacy_keras},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


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
