"""What LMS notices and says around the graphs it edits: one child process, one test a case."""

import ast
import os
import subprocess
from pathlib import Path

import pytest
import warm_python

ROOT = Path(__file__).resolve().parents[3]
JOB = Path(__file__).with_name("watch_job.py")

pytestmark = pytest.mark.tensorflow


def _cases() -> list[str]:
    for node in ast.parse(JOB.read_text(encoding="utf-8")).body:
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and node.targets[0].id == "CASES"
        ):
            return [one.id for one in node.value.elts]  # type: ignore[attr-defined]
    raise AssertionError("no CASES")


@pytest.fixture(scope="module")
def done() -> "subprocess.CompletedProcess[str]":
    pytest.importorskip("tensorflow")
    return warm_python.run([str(JOB)], {**os.environ, "PYTHONPATH": str(ROOT)}, timeout_s=300)


@pytest.mark.parametrize("case", _cases())
def test_case(case: str, done: "subprocess.CompletedProcess[str]") -> None:
    assert f"held: {case}" in done.stdout.splitlines(), done.stderr[-4000:]
