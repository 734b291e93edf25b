"""What all tests share. Its place also puts ``tests/`` on the import path, for ``import machines``."""

from collections.abc import Callable
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


GOLDEN = Path(__file__).resolve().parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write what tests/golden should hold")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """``golden(name, text)`` compares with ``tests/golden/<name>``; ``--update-golden`` writes it."""

    def compare(name: str, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--update-golden"):
            path.write_text(text, encoding="utf-8")
        assert path.is_file(), f"no {path}; write it with pytest --update-golden and look at it"
        assert text == path.read_text(encoding="utf-8")

    return compare
