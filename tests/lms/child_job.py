"""Runs a job of these tests in a process of its own; its last line is what it found, as JSON."""

import json
import os
from pathlib import Path
from typing import Any

import warm_python

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


def run_job(name: str, *arguments: str, **environ: str) -> dict[str, Any]:
    """What ``name``, a script in this folder or one within it, found."""
    (script,) = HERE.rglob(name.rpartition("/")[2])
    done = warm_python.run(
        [str(script), *arguments],
        {**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3", **environ},
        timeout_s=900,  # against a job that hangs: nine models take minutes where others keep both cores busy
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
