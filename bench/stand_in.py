"""The stand-in GPU: TensorFlow devices of type GPU on a machine that has none.

``shared/rig/sim-gpu`` beside the repository, or ``$SIMGPU_RIG``, holds a plug-in that gives TensorFlow
such devices; its README says what it imitates. Here it is built once, into an environment in the user's cache
that takes all other packages from the running one.
"""

import csv
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
VARIABLE = "SIMGPU_RIG"
"""Names the folder of the plug-in's sources."""
BUILD_TIMEOUT_S = 900
LARGE_COPY_BYTES = 65_536

Row = dict[str, str]


class NoStandInError(Exception):
    """There is no stand-in here; the text says what is missing."""


def find_rig(environ: Mapping[str, str]) -> Path:
    """Return the folder of the plug-in's sources.

    Raises:
        NoStandInError: If it is not there, or this machine cannot build it.
    """
    rig = Path(environ.get(VARIABLE) or ROOT.parent / "shared/rig/sim-gpu")
    if not (rig / "build.sh").is_file():
        raise NoStandInError(f"no stand-in GPU at {rig}; {VARIABLE} names another folder")
    if shutil.which("g++") is None:
        raise NoStandInError("no g++, which the stand-in GPU is built with")
    try:
        found = version("tensorflow")
    except PackageNotFoundError as error:
        raise NoStandInError("no TensorFlow") from error
    if not found.startswith("2.21."):
        raise NoStandInError(f"TensorFlow {found}; the stand-in GPU lists the kernels of 2.21")
    return rig


def prepare(environ: Mapping[str, str]) -> Path:
    """Return the Python with the stand-in; build it first where that has not been done for these sources.

    Raises:
        NoStandInError: If it cannot be built here.
    """
    rig = find_rig(environ)
    cache = Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lmsrun" / "sim-gpu"
    cache.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256(f"{sys.executable}\n{version('tensorflow')}".encode())
    for path in (Path(__file__), rig / "build.sh", rig / "gpu_kernels.tsv", *sorted((rig / "src").iterdir())):
        digest.update(path.read_bytes())
    folder = cache / digest.hexdigest()[:16]
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            _build(rig, folder)
    return folder / "bin/python"


def _build(rig: Path, folder: Path) -> None:
    """Make the environment beside its place, and put it there once it is whole."""
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        made = Path(temporary) / "made"
        venv.create(made, symlinks=True, with_pip=True)
        (site,) = made.glob("lib/python3*/site-packages")
        # Without CUDA: a wheel with it has kernels for devices of type GPU, which call a driver.
        wheel = f"tensorflow-cpu=={version('tensorflow')}"
        pip = [str(made / "bin/python"), "-m", "pip", "install", "-q", "--no-deps", wheel]
        for argv in (pip, ["bash", str(rig / "build.sh"), str(made)]):
            _done(argv, temporary)
        packages = sysconfig.get_paths()["purelib"]
        (site / "packages.pth").write_text(f"import site; site.addsitedir({packages!r})\n")
        made.rename(folder)


def _done(argv: list[str], temporary: str) -> None:
    environ = {**os.environ, "TMPDIR": temporary}
    done = subprocess.run(
        argv, env=environ, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=False
    )
    if done.returncode:
        raise NoStandInError(f"the stand-in GPU cannot be built: {argv} failed: {done.stderr[-2000:]}")


@dataclass(frozen=True)
class Ran:
    """What a process on the stand-in has left."""

    found: dict[str, Any]
    """Its last line, as JSON."""
    rows: tuple[Row, ...]
    """What the devices did, in the order in which it ended."""
    errors: str


def run(argv: list[str], environ: Mapping[str, str], *, traced: bool = False, timeout_s: float = 600) -> Ran:
    """Run a Python script of ours on the stand-in.

    Args:
        argv: The script and its arguments.
        environ: Variables to set beside those of this process.
        traced: Whether to keep what the devices did.
        timeout_s: The most that it may take.

    Raises:
        NoStandInError: If there is no stand-in.
        RuntimeError: If it fails.
    """
    python = prepare(os.environ)
    with tempfile.TemporaryDirectory(prefix="lmsrun-stand-in-") as folder:
        trace = Path(folder) / "trace.csv"
        settings = {"TF_CPP_MIN_LOG_LEVEL": "2", "PYTHONPATH": str(ROOT), **environ}
        if traced:
            settings["SIMGPU_TRACE"] = str(trace)
        done = subprocess.run(
            [str(python), *argv],
            env={**os.environ, **settings},
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        if done.returncode:
            said = f"{done.stdout[-1000:]}{done.stderr[-6000:]}"
            raise RuntimeError(f"{argv} ended with {done.returncode}:\n{said}")
        rows: tuple[Row, ...] = ()
        if trace.exists():
            with trace.open(encoding="utf-8") as file:
                rows = tuple(csv.DictReader(file))
        return Ran(json.loads(done.stdout.splitlines()[-1]), rows, done.stderr)


@dataclass(frozen=True)
class Copies:
    """The large copies of a trace, both ways together."""

    seconds: float
    beside_s: float
    """How much of that the compute queue was busy."""
    both_s: float
    """How long copies went both ways at once."""
    nbytes: int

    @property
    def hidden(self) -> float:
        """The share of the seconds that lies beside compute."""
        return self.beside_s / self.seconds if self.seconds else 0.0


def copies_of(rows: tuple[Row, ...]) -> Copies:
    """Return what the large copies of a trace took, and what ran beside them."""
    compute = _spans(rows, lambda row: row["queue"] == "compute")
    large = [row for row in rows if int(row["bytes"]) >= LARGE_COPY_BYTES]
    ways = [_spans(large, lambda row, way=way: row["what"] == way) for way in ("copy_d2h", "copy_h2d")]
    every = [*ways[0], *ways[1]]
    moved = sum(int(row["bytes"]) for row in large if row["what"] in ("copy_d2h", "copy_h2d"))
    seconds = sum(end - begin for begin, end in every)
    return Copies(seconds, _together(every, compute), _together(*ways), moved)


Span = tuple[float, float]


def _spans(rows: Any, wanted: Any) -> list[Span]:
    return sorted((float(row["began"]), float(row["ended"])) for row in rows if wanted(row))


def _together(some: list[Span], others: list[Span]) -> float:
    """Return for how long of ``some`` one of ``others``, which do not overlap each other, goes on."""
    return sum(max(0.0, min(end, e) - max(begin, b)) for begin, end in some for b, e in others)
