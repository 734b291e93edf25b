"""What all tests share. Its place also puts ``tests/`` on the import path, for ``import machines``."""

from pathlib import Path

import pytest

SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture
def topologies() -> Path:
    """The folder of real machines' saved topologies; skips where it is not."""
    folder = SHARED / "topologies"
    if not folder.is_dir():
        pytest.skip(f"no real topologies at {folder}")
    return folder
