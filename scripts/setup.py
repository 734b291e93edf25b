"""Make ``.venv`` with all that lmsrun needs to run, train and be tested; later it only checks a stamp.

Needs nothing but a Python of 3.10 or newer. ``TENSORFLOW=2.15.1`` and ``LMSRUN_VENV=.venv-tf215`` give a
second environment for another TensorFlow.
"""

import ctypes
import glob
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

if sys.version_info < (3, 10):  # noqa: UP036 - said before an import that an older Python cannot read
    sys.exit("setup: this Python is too old; needed 3.10 or newer. Try: make PYTHON=python3.11")

from build_horovod import BuildError, locked, run_logged

ROOT = Path(__file__).resolve().parent.parent
EXTRAS = "gpu,mpi,plot,examples,dev,docs,packages"
INPUTS = (
    *("pyproject.toml", "scripts/setup.py", "lmsrun/wheels/build_horovod.py"),
    *("lms/native/arena.c", "lms/native/cache.c", "lms/optimizer/plugin.c"),
)
STAMP = ".lmsrun-setup"
HIDING = 'sys.modules.update(dict.fromkeys(os.environ.get("TESTS_HIDE_MODULES", "").split()))'
"""Read by every Python of the environment as it starts: an import of a hidden module fails."""

Package = tuple[str, str, bool]
"""(Debian package, the program or shared library that shows it is there, whether nothing works without it)"""

SYSTEM_PACKAGES: tuple[Package, ...] = (
    ("g++", "g++", True),
    ("make", "make", True),
    ("cmake", "cmake", True),
    ("numactl", "numactl", False),
    ("libnuma1", "libnuma.so.1", False),
    ("openmpi-bin", "mpirun", False),
    ("libopenmpi-dev", "mpicxx", False),
)


class SetupError(Exception):
    """One line for a person: what was found, what was needed, what to try."""


def is_present(sign: str) -> bool:
    """Whether a program is on the path, or a shared library can be loaded."""
    if ".so" not in sign:
        return shutil.which(sign) is not None
    try:
        ctypes.CDLL(sign)
    except OSError:
        return False
    return True


def missing_packages() -> list[Package]:
    """List what the system lacks, the ``venv`` module of a Debian Python among it."""
    found = [package for package in SYSTEM_PACKAGES if not is_present(package[1])]
    if importlib.util.find_spec("ensurepip") is None:
        name = f"python{sys.version_info.major}.{sys.version_info.minor}-venv"
        found.append((name, "ensurepip", True))
    return found


def install_packages(missing: list[Package], log: Path, may_install: bool) -> None:
    """Install with apt; where we may not, say what to ask for, and go on when it is not essential."""
    names = [name for name, _, _ in missing]
    if may_install:
        say(f"installing {' '.join(names)} with apt (a minute or two)")
        environ = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        run_logged(["apt-get", "update", "-qq"], environ, log, lambda line: None)
        argv = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *names]
        run_logged(argv, environ, log, lambda line: None)
        return
    request = f"ask for: sudo apt-get install {' '.join(names)} (or your system's packages of these names)"
    if essential := [name for name, _, needed in missing if needed]:
        raise SetupError(
            f"not found: {', '.join(names)}; needed at least {', '.join(essential)}. Try: {request}"
        )
    say(f"not found: {', '.join(names)}; going on without. To have them {request}")


def tensorflow_requirements(version: str, has_gpu: bool) -> list[str]:
    """``2.21`` means its latest patch, ``2.15.1`` exactly that one; with a GPU its CUDA libraries too."""
    minor = ".".join(version.split(".")[:2])
    exact = version if version.count(".") >= 2 else f"{version}.*"
    return [f"tensorflow{'[and-cuda]' if has_gpu else ''}=={exact}", f"tf-keras=={minor}.*"]


def fingerprint(venv: Path, requirements: list[str]) -> str:
    """Hash everything that decides the environment's content.

    Of the interpreter that is what packages are made for, such as cpython-311: not its patch level nor its
    date of build, which a system upgrade changes.
    """
    digest = hashlib.sha256()
    abi = f"{sys.implementation.cache_tag} {sysconfig.get_config_var('SOABI')}"
    for item in (str(ROOT), str(venv), abi, *requirements):
        digest.update(item.encode() + b"\0")
    for name in INPUTS:
        digest.update((ROOT / name).read_bytes() + b"\0")
    return digest.hexdigest()


def is_ready(venv: Path, mark: str) -> bool:
    """Whether the stamp is this very set-up's and the interpreter is still there."""
    try:
        return (venv / STAMP).read_text() == mark and os.access(venv / "bin" / "python", os.X_OK)
    except OSError:
        return False


def fill(venv: Path, requirements: list[str], log: Path) -> None:
    """Create the environment and install into it; nothing is downloaded that is there already."""
    python = str(venv / "bin" / "python")
    environ = {
        **{name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")},
        "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1", "PIP_ROOT_USER_ACTION": "ignore",
    }  # fmt: skip
    if not os.access(python, os.X_OK):
        say(f"creating {venv}")
        run_logged([sys.executable, "-m", "venv", "--clear", str(venv)], environ, log, lambda line: None)
    say(f"installing {requirements[0]} and the packages of pyproject.toml (about a minute the first time)")
    pip = [python, "-m", "pip", "install", "--quiet"]
    run_logged([*pip, "setuptools>=77,<80", "wheel"], environ, log, lambda line: None)
    argv = [*pip, "--no-build-isolation", "--editable", f"{ROOT}[{EXTRAS}]", *requirements]
    run_logged(argv, environ, log, lambda line: None)
    done = subprocess.run(
        [python, str(ROOT / "scripts" / "build_horovod.py")],
        env=environ,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    if done.returncode:
        raise SetupError("Horovod could not be built, see above. Try: make setup again when that is mended")


def link_manual(venv: Path) -> None:
    """Put the man pages, which an editable installation lacks, where ``man`` looks for those of ``bin``."""
    folder = venv / "share" / "man" / "man1"
    folder.mkdir(parents=True, exist_ok=True)
    for page in (ROOT / "docs" / "man").glob("*.1"):
        link = folder / page.name
        link.unlink(missing_ok=True)
        link.symlink_to(page)


def add_hiding(venv: Path) -> None:
    """Let the tests hide packages from the processes that they start, by a variable that nobody else sets."""
    (folder,) = venv.glob("lib/python3*/site-packages")
    (folder / "lmsrun_tests.pth").write_text(f"import os, sys; {HIDING}\n")


def say(text: str) -> None:
    """One line of progress."""
    print(f"setup: {text}", flush=True)


def main() -> int:
    """Set up and stamp; 1 with one line when that cannot be done."""
    venv = (ROOT / (os.environ.get("LMSRUN_VENV") or ".venv")).absolute()
    has_gpu = any(glob.iglob("/proc/driver/nvidia/gpus/*"))
    requirements = tensorflow_requirements(os.environ.get("TENSORFLOW") or "2.21", has_gpu)
    mark = fingerprint(venv, requirements)
    if is_ready(venv, mark):
        return 0
    started = time.monotonic()
    log = venv.with_name(f"{venv.name}-setup.log")
    try:
        with locked(venv.with_name(f"{venv.name}-setup.lock")):
            if is_ready(venv, mark):
                return 0
            log.unlink(missing_ok=True)
            if missing := missing_packages():
                install_packages(missing, log, os.geteuid() == 0 and bool(shutil.which("apt-get")))
            fill(venv, requirements, log)
            link_manual(venv)
            add_hiding(venv)
            (venv / STAMP).write_text(mark)
    except (SetupError, BuildError) as error:
        print(f"setup: {error}", file=sys.stderr)
        return 1
    say(f"done in {time.monotonic() - started:.0f} s; {venv}/bin holds lmsrun")
    return 0


if __name__ == "__main__":
    sys.exit(main())
