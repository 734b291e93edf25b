"""The pictures of README.md are those that its script makes now."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.tensorflow
def test_the_pictures_are_current() -> None:
    pytest.importorskip("tensorflow")
    argv = [sys.executable, str(ROOT / "scripts" / "pictures.py"), "--check"]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-300:]


def test_the_readme_shows_them() -> None:
    shown = (ROOT / "README.md").read_text()
    for path in (ROOT / "docs" / "pictures").iterdir():
        assert f"](docs/pictures/{path.name})" in shown
