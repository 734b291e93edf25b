"""Build Horovod for the TensorFlow of this interpreter, keep the wheel, and install it.

Horovod's last release (0.28.1) does not compile against TensorFlow 2.14 and later as it is: its XLA ops
include headers that moved. Those ops are switched off here, which is all that is lost. A wheel enters the
cache only after it was installed elsewhere and has reduced a tensor.

It needs nothing but the standard library, so that it also runs by path where lmsrun is not installed yet.
"""

import argparse
import dataclasses
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import json
import math
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

VERSION = "0.28.1"
SDIST_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
RECIPE = 1
"""Raise it when the way of building changes, so that older wheels are not taken from the cache."""

CPU_SECONDS, OTHER_SECONDS = 280, 40
"""What compiling took in all, and what does not get faster with more CPUs: 164 s on two of them."""

XLA_SOURCE = Path("horovod/tensorflow/xla_mpi_ops.cc")
XLA_GUARD = "#if TENSORFLOW_VERSION >= 2006000000"
MINIMUM_CMAKE = (3, 13)
TENSORFLOW_DISTRIBUTIONS = (
    "tensorflow",
    "tensorflow-cpu",
    "tensorflow-gpu",
    "tensorflow-rocm",
    "intel-tensorflow",
)
"""As ``launch.installed.versions`` says it, which is not here where this file runs by path."""
PERCENT = re.compile(r"\[\s*(\d{1,3})%\]")
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")

INSTALL_TENSORFLOW = "pip install 'tensorflow>=2.15,<2.22' 'tf-keras>=2.15,<2.22'"
"""As ``lms.errors.pip_install`` says it, which is not here where this file runs by path."""

BUILD_REQUIREMENTS = ("setuptools>=77,<80", "wheel", "packaging")
RUN_REQUIREMENTS = ("cloudpickle", "psutil", "pyyaml", "packaging")

CHECK = """
import horovod.tensorflow as hvd, tensorflow as tf
hvd.init()
assert hvd.size() == 1 and hvd.gloo_built(), "Horovod came without Gloo"
assert hvd.allreduce(tf.constant([1.0, 3.0]), op=hvd.Sum).numpy().tolist() == [1.0, 3.0], "allreduce is wrong"
"""


class BuildError(Exception):
    """One line for a person: what was found, what was needed, what to try."""


@dataclasses.dataclass(frozen=True)
class Toolchain:
    """What the build would use; versions are None where the tool is not there."""

    tensorflow: str | None
    cxx: str | None
    make: str | None
    cmake: tuple[int, int] | None
    mpi: str | None
    nccl: str | None

    def missing(self) -> list[tuple[str, str]]:
        """List (what, remedy) of everything without which no build can succeed."""
        checks: list[tuple[object, str, str]] = [
            (
                self.tensorflow,
                "TensorFlow",
                f"{INSTALL_TENSORFLOW} (its headers are compiled against)",
            ),
            (self.cxx, "a C++17 compiler (g++)", "apt-get install g++"),
            (self.make, "make", "apt-get install make"),
            (self.cmake, "CMake", "apt-get install cmake"),
        ]
        found = [(what, remedy) for value, what, remedy in checks if not value]
        if importlib.util.find_spec("pip") is None:
            found.append(("pip", f"{sys.executable} -m ensurepip"))
        if self.cmake and self.cmake < MINIMUM_CMAKE:
            found.append((f"CMake >= 3.13 (found {'.'.join(map(str, self.cmake))})", "pip install cmake"))
        return found

    def cache_key(self) -> str:
        """Everything that decides whether a wheel built elsewhere fits here."""
        parts = [
            f"horovod-{VERSION}-r{RECIPE}",
            f"tensorflow-{self.tensorflow}",
            f"cp{sys.version_info.major}{sys.version_info.minor}",
            self.mpi or "nompi",
            *([f"nccl-{self.nccl}"] if self.nccl else []),
            "".join(platform.libc_ver()) or "libc",
            platform.machine(),
        ]
        return re.sub(r"[^A-Za-z0-9._-]+", "_", "--".join(parts))

    def environment(self, jobs: int) -> dict[str, str]:
        """Horovod's own build switches."""
        switches = {
            "HOROVOD_WITH_TENSORFLOW": "1",
            "HOROVOD_WITHOUT_PYTORCH": "1",
            "HOROVOD_WITHOUT_MXNET": "1",
            "HOROVOD_WITH_GLOO": "1",
            "HOROVOD_WITH_MPI" if self.mpi else "HOROVOD_WITHOUT_MPI": "1",
            "CXX": self.cxx or "g++",
            "MAKEFLAGS": f"-j{jobs}",
            "LDFLAGS": "-Wl,--strip-debug",  # the build type adds -g; 100 MB of it serve nobody here
        }
        if self.nccl:
            switches["HOROVOD_GPU_OPERATIONS"] = "NCCL"
        return switches


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def read_toolchain(environ: Mapping[str, str]) -> Toolchain:
    """Look at this machine and this interpreter; starts ``cmake --version`` and ``mpirun --version`` only."""
    path = environ.get("PATH")
    cmake = re.search(r"version (\d+)\.(\d+)", _version_text("cmake", environ))
    return Toolchain(
        tensorflow=next(filter(None, map(_version, TENSORFLOW_DISTRIBUTIONS)), None),
        cxx=shutil.which(environ.get("CXX") or "g++", path=path),
        make=shutil.which("make", path=path),
        cmake=(int(cmake[1]), int(cmake[2])) if cmake else None,
        mpi=parse_mpi(_version_text("mpirun", environ)) if shutil.which("mpicxx", path=path) else None,
        nccl=read_nccl(environ) if shutil.which("nvcc", path=path) else None,
    )


def parse_mpi(text: str) -> str:
    """``mpirun --version`` to a short name such as ``openmpi-4.1.4``."""
    for flavour, pattern in (
        ("spectrum", r"Spectrum MPI.*?(\d+(?:\.\d+)+)"),
        ("openmpi", r"Open MPI\)?\s+v?(\d+(?:\.\d+)+)"),
        ("intelmpi", r"Intel\(R\) MPI Library.*?Version (\S+)"),
        ("mpich", r"Version:\s+(\d+(?:\.\d+)+)"),
    ):
        if found := re.search(pattern, text, re.DOTALL):
            return f"{flavour}-{found[1]}"
    return "mpi"


def read_nccl(environ: Mapping[str, str]) -> str | None:
    """Read the version of the NCCL headers where Horovod's CMake looks for them; None when there are none."""
    homes = [environ.get(name, "") for name in ("HOROVOD_NCCL_HOME", "NCCL_HOME", "CUDA_HOME")]
    for home in [*filter(None, homes), "/usr", "/usr/local/cuda"]:
        try:
            text = Path(home, "include", "nccl.h").read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        found = re.search(r"#define\s+NCCL_VERSION_CODE\s+(\d+)", text)
        return found[1] if found else "unknown"
    return None


def _version_text(tool: str, environ: Mapping[str, str]) -> str:
    try:
        done = subprocess.run(
            [tool, "--version"], env=dict(environ), capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout


def patch_source(text: str) -> str:
    """Switch the XLA ops off.

    Raises:
        BuildError: If the guard is not there exactly once; then this is not the source the recipe is for.
    """
    found = text.count(XLA_GUARD + "\n")
    if found != 1:
        raise BuildError(
            f"{XLA_SOURCE} holds its version guard {found} times; needed exactly once (horovod {VERSION}). "
            "Try: check that the index serves the original source release"
        )
    return text.replace(XLA_GUARD + "\n", "#if 0  // its XLA headers moved in TensorFlow 2.14\n")


def unpack(archive: Path, target: Path) -> Path:
    """Unpack the source release below ``target``, if it is the very one this recipe was made for."""
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    if digest != SDIST_SHA256:
        raise BuildError(
            f"{archive.name} has SHA-256 {digest}; needed {SDIST_SHA256}. Try: another package index"
        )
    # Debian 12's Python has no filters yet; the digest above says that nothing here leads outside.
    with tarfile.open(archive) as bundle:
        bundle.extraction_filter = getattr(tarfile, "data_filter", None)
        bundle.extractall(target)  # noqa: S202
    return target / archive.name.removesuffix(".tar.gz")


@contextmanager
def progress(title: str, stream_is_tty: bool) -> Iterator[Callable[[int], None]]:
    """Show a bar to people, a line every tenth to logs; the callable takes the percentage reached."""
    try:
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
    except ImportError:
        stream_is_tty = False
    if stream_is_tty:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeElapsedColumn(),
        )
        with Progress(*columns) as bar:
            task = bar.add_task(title, total=100)
            yield lambda percent: bar.update(task, completed=percent)
        return
    started, shown = time.monotonic(), -1

    def say(percent: int) -> None:
        nonlocal shown
        if percent // 10 > shown:
            shown = percent // 10
            print(f"{title}: {percent}% after {time.monotonic() - started:.0f} s", flush=True)

    yield say


def run_logged(argv: list[str], environ: Mapping[str, str], log: Path, seen: Callable[[str], None]) -> None:
    """Run a command, output to ``log`` and line by line to ``seen``; the exception has the log's errors."""
    with (
        log.open("a", encoding="utf-8") as out,
        subprocess.Popen(
            argv,
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as child,
    ):
        out.write(f"$ {shlex.join(argv)}\n")
        for line in child.stdout or ():
            out.write(line)
            seen(line)
    if child.returncode:
        lines = [line for line in log.read_text("utf-8", "replace").splitlines() if not line.startswith("$ ")]
        telling = [line.strip() for line in lines if re.search(r"\berror\b", line, re.IGNORECASE)] or lines[
            -5:
        ]
        detail = "\n  ".join(telling[:5])
        raise BuildError(
            f"{shlex.join(argv[:5])} ... ended with {child.returncode}. Try: read {log}\n  {detail}"
        )


def build_wheel(tools: Toolchain, work: Path, log: Path, jobs: int, inherited: Mapping[str, str]) -> Path:
    """Download, patch and compile; the wheel is below ``work`` and not yet trusted."""
    environ = {**inherited, **tools.environment(jobs)}
    environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environ.get('PATH', '')}"
    run_logged(
        [*PIP, "install", "--quiet", *BUILD_REQUIREMENTS, *RUN_REQUIREMENTS], environ, log, lambda line: None
    )
    print(f"horovod: downloading the source release {VERSION}", flush=True)
    fetch = [
        *PIP,
        "download",
        "--no-deps",
        "--no-binary",
        ":all:",
        "--no-build-isolation",
        f"horovod=={VERSION}",
    ]
    run_logged([*fetch, "--dest", str(work)], environ, log, lambda line: None)
    source = unpack(work / f"horovod-{VERSION}.tar.gz", work / "source")
    target = source / XLA_SOURCE
    target.write_text(patch_source(target.read_text(encoding="utf-8")), encoding="utf-8")
    with progress("horovod: compiling", sys.stdout.isatty()) as advance:
        argv = [
            *PIP,
            "wheel",
            str(source),
            "-v",
            "--no-deps",
            "--no-build-isolation",
            "--wheel-dir",
            str(work / "out"),
        ]
        run_logged(
            argv,
            environ,
            log,
            lambda line: advance(int(found[1])) if (found := PERCENT.search(line)) else None,
        )
        advance(100)
    (wheel,) = (work / "out").glob("horovod-*.whl")
    return wheel


def verify_wheel(wheel: Path, work: Path, log: Path, inherited: Mapping[str, str]) -> None:
    """Install the wheel into a folder of its own and let one process allreduce with it."""
    place = work / "verify"
    environ = {k: v for k, v in inherited.items() if not k.startswith(("HOROVOD_", "OMPI_", "PMI"))}
    run_logged(
        [*PIP, "install", "--quiet", "--no-deps", "--target", str(place), str(wheel)],
        environ,
        log,
        lambda _: None,
    )
    environ |= {
        "PYTHONPATH": str(place), "TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "",
        "HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo",
    }  # fmt: skip
    run_logged([sys.executable, "-c", CHECK], environ, log, lambda _: None)


def cache_folder(environ: Mapping[str, str]) -> Path:
    """Where wheels are kept: ``$XDG_CACHE_HOME/lmsrun/wheels``."""
    return Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "lmsrun", "wheels")


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Two set-ups at once build once; the second waits and then finds the wheel."""
    with path.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for another set-up, which holds {path}", flush=True)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


@dataclasses.dataclass(frozen=True)
class Host:
    """What of this machine decides how long compiling takes."""

    cpus: int
    """All of its CPUs, which share its load."""
    load: float
    """How many processes want a CPU, over the last minute."""


def read_host() -> Host:
    """Count the CPUs, and read the load; 0 where the system does not tell it."""
    cpus = os.cpu_count() or 1
    try:
        return Host(cpus, os.getloadavg()[0])
    except OSError:
        return Host(cpus, 0.0)


def estimate_minutes(jobs: int, host: Host) -> int:
    """How long compiling takes with so many compilers at a time, which share the CPUs with the load."""
    compiling = jobs * min(1.0, host.cpus / (jobs + host.load))
    return math.ceil((CPU_SECONDS / compiling + OTHER_SECONDS) / 60)


def describe_time(jobs: int, host: Host) -> str:
    """Say how long compiling takes, as far as that can be known beforehand."""
    now, idle = estimate_minutes(jobs, host), estimate_minutes(jobs, Host(host.cpus, 0.0))
    if now == idle:
        return f"about {idle} min on idle CPUs"
    return f"about {now} min at the load of {host.load:.1f} ({idle} min on idle CPUs)"


def describe_worth() -> str:
    """Say in one line what Horovod brings and what it costs, for those who do not have it."""
    takes = describe_time(len(os.sched_getaffinity(0)), read_host())
    return (
        "Horovod would bring Keras's fit over several ranks and elastic jobs; `lmsrun build-horovod` builds "
        f"it, once, in {takes}; MultiWorkerMirroredStrategy trains without it"
    )


def obtain_wheel(tools: Toolchain, cache: Path, jobs: int, environ: Mapping[str, str]) -> Path:
    """Obtain the wheel for these tools: from the cache, or built and verified now."""
    home = cache / tools.cache_key()
    cache.mkdir(parents=True, exist_ok=True)
    with locked(cache / f"{tools.cache_key()}.lock"):
        if cached := sorted(home.glob("*.whl")):
            print(f"horovod: found {cached[0]}", flush=True)
            return cached[0]
        if missing := tools.missing():
            raise BuildError(
                "; ".join(f"needed {what}, not found. Try: {remedy}" for what, remedy in missing)
            )
        if not tools.mpi:
            print(
                "horovod: no mpicxx found, building with Gloo only; apt-get install libopenmpi-dev adds MPI"
            )
        print(
            f"horovod: building with {jobs} compilers at a time takes {describe_time(jobs, read_host())}; "
            f"then it is kept in {cache}"
        )
        started = time.monotonic()
        log = cache / f"{tools.cache_key()}.log"
        log.unlink(missing_ok=True)
        with tempfile.TemporaryDirectory(dir=cache, prefix=".build-") as folder:
            work = Path(folder)
            wheel = build_wheel(tools, work, log, jobs, environ)
            print("horovod: verifying the wheel", flush=True)
            verify_wheel(wheel, work, log, environ)
            wheel.parent.rename(home)
        print(f"horovod: built in {time.monotonic() - started:.0f} s, kept in {home}", flush=True)
        return home / wheel.name


def installed_from() -> str | None:
    """Read the URL that the installed Horovod came from; None when none is known."""
    try:
        text = importlib.metadata.distribution("horovod").read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        return None
    return str(json.loads(text).get("url")) if text else None


def install_wheel(wheel: Path, environ: Mapping[str, str]) -> None:
    """Install the wheel unless this very one is installed already."""
    if installed_from() == wheel.as_uri():
        print("horovod: already installed", flush=True)
        return
    log = wheel.parent.parent / f"{wheel.parent.name}.log"
    run_logged([*PIP, "install", "--quiet", *RUN_REQUIREMENTS], environ, log, lambda line: None)
    argv = [*PIP, "install", "--quiet", "--no-deps", "--force-reinstall", str(wheel)]
    run_logged(argv, environ, log, lambda line: None)
    print(f"horovod: installed into {sysconfig.get_path('purelib')}", flush=True)


FLAGS = (
    ("--jobs", "N", "how many compilers may run at a time, where not one a CPU"),
    ("--check", "", "only say what the build would use and what is missing"),
)
"""The options: how each is typed, what follows it, what it means."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Refuse in one line."""
        self.exit(2, f"{self.prog}: {message}\n")


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Build or find the wheel and install it; 1 with one line when that cannot be done."""
    parser = _Parser("lmsrun build-horovod", description=(__doc__ or "").splitlines()[0])
    (jobs, metavar, jobs_help), (check, _, check_help) = FLAGS
    cpus = len(os.sched_getaffinity(0))
    parser.add_argument(jobs, type=_at_least_one, default=cpus, metavar=metavar, help=jobs_help)
    parser.add_argument(check, action="store_true", help=check_help)
    options = parser.parse_args(argv)
    tools = read_toolchain(environ)
    if options.check:
        for name, value in dataclasses.asdict(tools).items():
            shown = ".".join(map(str, value)) if isinstance(value, tuple) else value
            print(f"{name}: {shown or 'not found'}")
        return 1 if tools.missing() else 0
    try:
        install_wheel(obtain_wheel(tools, cache_folder(environ), options.jobs, environ), environ)
    except BuildError as error:
        print(f"horovod: {error}", file=sys.stderr)
        return 1
    return 0


def _at_least_one(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} given; needed a whole number, at least 1")
    return int(text)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
