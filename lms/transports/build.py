"""Compiles the swap ops, once per TensorFlow version, into the user's cache."""

import fcntl
import hashlib
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from lms.errors import BuildError

SOURCE = Path(__file__).resolve().parent.parent / "ops" / "host_store.cc"
LIBRARY = "host_store.so"
BUILD_TIMEOUT_S = 300.0


def cache_root(environ: Mapping[str, str]) -> Path:
    """Where built ops are kept: ``$LMS_CACHE``, else ``lmsrun/ops`` in the user's cache directory.

    Raises:
        BuildError: If the user has no home.
    """
    if own := environ.get("LMS_CACHE"):
        return Path(own)
    if base := environ.get("XDG_CACHE_HOME"):
        return Path(base) / "lmsrun" / "ops"
    try:
        home = Path(environ.get("HOME") or Path.home())
    except RuntimeError as error:  # in containers a user may have neither HOME nor an entry in passwd
        raise BuildError("the user has no home directory for the cache; set LMS_CACHE") from error
    return home / ".cache" / "lmsrun" / "ops"


def library_key(version: str, compile_flags: Sequence[str], source: bytes) -> str:
    """Name of the cache entry: changes with TensorFlow's version, its ABI and flags, and our source."""
    abi = [flag for flag in compile_flags if not flag.startswith("-I")]
    digest = hashlib.sha256(b"\0".join([source, *map(str.encode, abi), os.uname().machine.encode()]))
    return f"tf{version}-{digest.hexdigest()[:16]}"


def build_library(
    version: str,
    compile_flags: Sequence[str],
    link_flags: Sequence[str],
    root: Path,
    run: Callable[..., "subprocess.CompletedProcess[str]"] = subprocess.run,
) -> Path:
    """Return the built library, compiling it when the cache does not hold it (5-20 s).

    Several ranks of one host may ask at once: one compiles, the others wait for it.

    Args:
        version: TensorFlow's version.
        compile_flags: ``tf.sysconfig.get_compile_flags()``.
        link_flags: ``tf.sysconfig.get_link_flags()``.
        root: The cache, as :func:`cache_root` gives it.
        run: What starts the compiler.

    Raises:
        BuildError: If there is no compiler, it fails, or the cache is not ours to trust or to write.
    """
    home = root / library_key(version, compile_flags, SOURCE.read_bytes())
    try:
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
        _require_own(home)
        with _locked(home / "lock"):
            library = home / LIBRARY
            if not library.exists():
                _compile(library, compile_flags, link_flags, run)
            _require_own(library)
            return library
    except OSError as error:
        raise BuildError(f"cannot use the cache {root}: {error.strerror or error}; set LMS_CACHE") from error


def _require_own(path: Path) -> None:
    """Code that we load must be ours: nobody else may own it or be able to write it."""
    found = path.stat()
    if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise BuildError(
            f"{path} can be changed by other users; remove it, or set LMS_CACHE to a private directory"
        )


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _compile(
    library: Path,
    compile_flags: Sequence[str],
    link_flags: Sequence[str],
    run: Callable[..., "subprocess.CompletedProcess[str]"],
) -> None:
    compiler = shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")
    if compiler is None:
        raise BuildError("no C++ compiler found (g++, c++, clang++); install one for the fast transport")
    descriptor, partial = tempfile.mkstemp(dir=library.parent, suffix=".so.part")
    os.close(descriptor)
    argv = [compiler, "-O2", "-fPIC", "-shared", *compile_flags, str(SOURCE), "-o", partial, *link_flags]
    try:
        done = run(argv, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=False)
        if done.returncode != 0:
            line = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr[-200:])
            raise BuildError(f"{Path(compiler).name} could not compile the swap ops: {line.strip()}")
        os.chmod(partial, 0o700)
        os.replace(partial, library)
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"compiling the swap ops took more than {BUILD_TIMEOUT_S:.0f} s") from error
    finally:
        Path(partial).unlink(missing_ok=True)
