"""What all tests share. Its place also puts ``tests/`` on the import path, for ``import machines``."""

import os
import shutil
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
SHARED = HERE.parents[1] / "shared"

ENDING = (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGTERM)


def pytest_configure(config: pytest.Config) -> None:
    """Have the tests' jobs meet default signals, and no jobs but their own.

    Each worker of a run has a folder of its own for running jobs: those of other workers are no neighbours.
    ``nohup`` and a shell's ``&`` start what ignores them, and whatever is started from there inherits it: no
    job could be ended by them. A handler does not reach over an exec, and here it does nothing: this run goes
    on ignoring what it was told to ignore.

    TensorFlow turns oneDNN on for some processors only, and its own kernels need other memory: tests have the
    same kernels everywhere. The facts of both are tested in ``tests/lms/device``.
    """
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")
    folder = tempfile.mkdtemp(prefix="lmsrun-tests-")
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    os.environ["LMSRUN_JOBS_DIR"] = folder
    for number in ENDING:
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda *_: None)


HIDE, HIDDEN = "TESTS_HIDE_MODULES", "sklearn matplotlib"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Hide from a test's processes what Keras imports where it is there, a third of a start of TensorFlow.

    ``scripts/setup.py`` has the environment's Python read the variable. Tests marked ``extras`` need them.
    """
    if item.get_closest_marker("extras"):
        os.environ.pop(HIDE, None)
    else:
        os.environ[HIDE] = HIDDEN


ALONE = ("vm", "docker", "cluster", "gpu")
"""The folders whose tests share what a machine has once: guests' images, containers, ports, the stand-in.
With several processes they begin first, for they take longest."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Have each of several processes know the folders of ``ALONE`` as those that begin."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: home_of(item.nodeid) not in ALONE)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Have one of several processes run all tests of a file, or of a folder of ``ALONE``."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Homes(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return home_of(nodeid)

    return Homes(config, log)


def home_of(nodeid: str) -> str:
    """Return the file of a test, or its folder of ``ALONE``."""
    path = nodeid.partition("::")[0]
    folder = path.removeprefix("tests/").partition("/")[0]
    return folder if folder in ALONE else path


@pytest.fixture
def topologies() -> Path:
    """The folder of real machines' saved topologies; skips where it is not."""
    folder = SHARED / "topologies"
    if not folder.is_dir():
        pytest.skip(f"no real topologies at {folder}")
    return folder


GOLDEN = HERE / "golden"


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
