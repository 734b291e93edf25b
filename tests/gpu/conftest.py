"""Tests on the stand-in GPU: skipped with a reason where there is none, built once into the user's cache."""

import os
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "bench"))

import stand_in  # noqa: E402


@pytest.fixture(scope="session", autouse=True)
def device() -> None:
    """The stand-in GPU."""
    try:
        stand_in.prepare(os.environ)
    except stand_in.NoStandInError as error:
        pytest.skip(str(error))
