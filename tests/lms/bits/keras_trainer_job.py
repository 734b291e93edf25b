"""Runs Keras's own tests of its trainer, without LMS and with every tensor a candidate; prints JSON.

    python tests/lms/bits/keras_trainer_job.py                       # the tests that the wheel holds
    python tests/lms/bits/keras_trainer_job.py keras-3.15.1 -k fit   # a checkout, or an unpacked sdist

The source must be of the version that is installed. ``broken`` names the tests that pass without LMS alone.
"""

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
TEST = Path("keras", "src", "trainers", "trainer_test.py")
VERSION = re.compile(r'__version__ = "([^"]+)"')


class NoTestsError(Exception):
    """There are no tests of this version of Keras; the text says why."""


def main() -> None:
    """Run them twice, and compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", nargs="?", type=Path, help="folder that holds the folder keras")
    parser.add_argument("-k", dest="chosen", default="", help="as pytest's")
    parser.add_argument("--policy", default="all")
    options = parser.parse_args()
    try:
        test = find_test(options.source)
    except NoTestsError as error:
        print(json.dumps({"skipped": str(error)}))
        return
    off, on = (run(test, options.chosen, policy) for policy in ("", options.policy))
    names = [name for name, how in off["outcome"].items() if how == "passed"]
    broken = {name: on["outcome"].get(name, "did not run") for name in names}
    broken = {name: on["said"].get(name, how) for name, how in broken.items() if how != "passed"}
    counts = {
        "passed": len(names),
        "ran": len(off["outcome"]),
        "tensors": on.get("tensors", 0),
        "swap_outs": on.get("swap_outs", 0),
    }
    print(json.dumps(counts | {"broken": broken, "failed without LMS": sorted(off["said"])}))


def find_test(source: Path | None) -> Path:
    """The file of tests in a folder, or in what is installed.

    Raises:
        NoTestsError: If it is not there, or of another version.
    """
    if source is None:
        found = importlib.util.find_spec("keras")
        if found is None or found.origin is None:
            raise NoTestsError("Keras is not installed")
        source = Path(found.origin).parents[1]
    test, told = source.resolve() / TEST, source / "keras" / "src" / "version.py"
    if not test.is_file():
        raise NoTestsError(f"no {TEST} in {source}; needed a source of Keras {version('keras')}")
    this = VERSION.search(told.read_text(encoding="utf-8"))
    if this is None or this[1] != version("keras"):
        raise NoTestsError(f"{source} is Keras {this and this[1]}; needed {version('keras')}")
    return test


def run(test: Path, chosen: str, policy: str) -> dict[str, Any]:
    """What each test came to, in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="keras-trainer-") as folder:
        outcomes, settings = Path(folder, "outcomes.json"), Path(folder, "pytest.ini")
        settings.write_text("[pytest]\n", encoding="utf-8")  # not those of this project, nor of Keras
        path = os.pathsep.join([str(test.parents[3]), str(HERE), str(ROOT)])
        environ = {"PYTHONPATH": path, "TRAINER_POLICY": policy, "TRAINER_OUTCOMES": str(outcomes)}
        done = subprocess.run(
            [
                *(sys.executable, "-m", "pytest", "-q", "-c", str(settings), "--rootdir", folder),
                *("-p", "keras_trainer_plugin", "-p", "no:cacheprovider", "-k", chosen, str(test)),
            ],
            env={**os.environ, "KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3", **environ},
            capture_output=True,
            text=True,
            check=False,
        )
        if not outcomes.is_file():
            raise SystemExit(
                f"pytest ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
            )
        found: dict[str, Any] = json.loads(outcomes.read_text(encoding="utf-8"))
    return found


if __name__ == "__main__":
    main()
