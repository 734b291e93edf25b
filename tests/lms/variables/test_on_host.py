"""What is checked before any variable lies in host memory."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.tensorflow

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = """
import lms
try:
    lms.enable(optimizer_state="host", transport={transport!r})
except lms.errors.PlaceError as error:
    print("refused:", error)
"""


@pytest.mark.parametrize(
    ("transport", "said"),
    [
        ("host", "refused: variables cannot lie on the host: no C++ compiler found (g++, c++, clang++)"),
        ("numpy", "refused: optimizer_state is 'host' and transport is 'numpy'; needed transport 'host'"),
    ],
)
def test_what_is_missing_is_told_before_the_first_variable(transport: str, said: str, tmp_path: Path) -> None:
    pytest.importorskip("tensorflow")
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": str(tmp_path), "LMS_CACHE": str(tmp_path)}
    argv = [sys.executable, "-c", SCRIPT.format(transport=transport)]
    done = subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout.startswith(said), done.stdout + done.stderr[-2000:]
    assert done.stdout.count("\n") == 1
