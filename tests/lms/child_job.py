"""Runs a job of these tests in a process of its own; its last line is what it found, as JSON."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


def run_job(name: str, *arguments: str, **environ: str) -> dict[str, Any]:
    """What ``name``, a script in this folder or one within it, found."""
    (script,) = HERE.rglob(name.rpartition("/")[2])
    done = subprocess.run(
        [sys.executable, str(script), *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environ},
        capture_output=True,
        text=True,
        timeout=900,  # against a job that hangs: nine models take minutes where others keep both cores busy
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
