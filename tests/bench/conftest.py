"""What the tests of the benchmarks share."""

import sys
from pathlib import Path

import pytest


@pytest.fixture
def bench_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a test import the benchmarks' modules."""
    bench = Path(__file__).resolve().parents[2] / "bench"
    monkeypatch.setattr(sys, "path", [*sys.path, str(bench)])
