"""Runs cases of ``plugin_job.py`` in a process of their own."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
TIMEOUT_S = 600  # against a job that hangs; TensorFlow alone takes 10 s where others keep the cores busy


@dataclass(frozen=True)
class Found:
    """What the cases found, by name, and what they wrote to standard error."""

    cases: dict[str, Any]
    stderr: str

    @property
    def only(self) -> Any:
        (value,) = self.cases.values()
        return value


def run_cases(names: str, *arguments: str, home: Path = ROOT, **environ: str) -> Found:
    """Run the cases with the ``lms`` in ``home``, one after the other in one process."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("LMS_PLUGIN", "TF_"))}
    done = subprocess.run(
        [sys.executable, str(HERE / "plugin_job.py"), names, *arguments],
        env={**kept, "TF_CPP_MIN_LOG_LEVEL": "2", **environ, "PYTHONPATH": str(home)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and lines, f"{names} ended with {done.returncode}: {done.stderr[-3000:]}"
    return Found(json.loads(lines[-1]), done.stderr)
