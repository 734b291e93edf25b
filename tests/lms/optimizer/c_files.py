"""Compiles the C files of these tests, against the headers of the installed TensorFlow."""

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent


def compiler() -> str:
    """The C compiler; skips where there is none."""
    found = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if found is None:
        pytest.skip("no C compiler")
    return found


def own_headers() -> Path:
    """The folder of TensorFlow's headers, found without importing it; skips where there is none."""
    spec = importlib.util.find_spec("tensorflow")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("no TensorFlow")
    return Path(spec.submodule_search_locations[0]) / "include"


def build(source: str, output: Path, *flags: str) -> Path:
    """Compile a file of this folder to a shared object."""
    argv = [
        compiler(),
        "-shared",
        "-fPIC",
        f"-I{own_headers()}",
        *flags,
        str(HERE / source),
        "-o",
        str(output),
    ]
    done = subprocess.run([*argv, "-lpthread"], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    return output


def environments() -> list[Path]:
    """The folders of TensorFlow's headers of all environments of this checkout."""
    root = HERE.parents[2]
    found = [Path(sys.prefix), *sorted(root.glob(".venv*"))]
    pattern = "lib/python3*/site-packages/tensorflow/include"
    headers = [folder.resolve() for one in dict.fromkeys(found) for folder in one.glob(pattern)]
    return list(dict.fromkeys(headers))
