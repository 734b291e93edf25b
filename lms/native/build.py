"""Compile the ops, once per TensorFlow version, and the plug-in, once, into the user's cache."""

import fcntl
import hashlib
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from lms.config import CACHE_VARIABLE
from lms.errors import BuildError

SOURCES = Path(__file__).resolve().parent.parent / "ops"
HOST_STORE = SOURCES / "host_store.cc"
ALLOCATOR_STATS = SOURCES / "allocator_stats.cc"
HOST_VALUES = SOURCES / "host_values.cc"
FILLER = SOURCES / "filler.cc"
ASSIGN = SOURCES / "assign.cc"

BUILD_TIMEOUT_S = 900.0
"""A compiler that still runs then hangs: the store takes 2 s of one core, the statistics 9 s."""

FLAGS = ("-O2", "-fPIC", "-shared")
PARTIAL = ".so.part"


@dataclass(frozen=True)
class Language:
    """The language of a source file, with its compilers."""

    name: str
    compilers: tuple[str, ...]
    """The first of them that is there is taken."""
    flags: tuple[str, ...]
    remedy: str
    """What a compiler brings."""


CPLUSPLUS = Language("C++", ("g++", "c++", "clang++"), (), "install one")
C = Language(
    "C",
    ("cc", "gcc", "clang", "g++"),
    ("-x", "c"),
    "install one, or a wheel of lmsrun, which holds the built plug-in",
)
LANGUAGES = {".cc": CPLUSPLUS, ".c": C}


def cache_root(environ: Mapping[str, str]) -> Path:
    """Return the folder of the built ops: ``$LMS_CACHE``, else ``lmsrun/ops`` in the user's cache directory.

    Raises:
        BuildError: If the user has no home.
    """
    if own := environ.get(CACHE_VARIABLE):
        return Path(own)
    return user_cache(environ) / "ops"


def user_cache(environ: Mapping[str, str]) -> Path:
    """Return ``lmsrun`` in the user's cache directory.

    Raises:
        BuildError: If the user has no home.
    """
    if base := environ.get("XDG_CACHE_HOME"):
        return Path(base) / "lmsrun"
    try:
        home = Path(environ.get("HOME") or Path.home())
    except RuntimeError as error:  # in containers a user may have neither HOME nor an entry in passwd
        raise BuildError("the user has no home directory for the cache; set LMS_CACHE") from error
    return home / ".cache" / "lmsrun"


def library_key(version: str, compile_flags: Sequence[str], source: bytes) -> str:
    """Return the name of a cache entry; it changes with TensorFlow's version, ABI and flags, and our source.

    Without a version it stands for a library that is the same for all of them.
    """
    abi = [flag for flag in compile_flags if not flag.startswith("-I")]
    digest = hashlib.sha256(b"\0".join([source, *map(str.encode, abi), os.uname().machine.encode()]))
    return f"{f'tf{version}' if version else 'any'}-{digest.hexdigest()[:16]}"


def build_library(
    source: Path,
    version: str,
    compile_flags: Sequence[str],
    link_flags: Sequence[str],
    root: Path,
    run: Callable[..., "subprocess.CompletedProcess[str]"] = subprocess.run,
) -> Path:
    """Return the built library, compiling it when the cache does not hold it.

    Several ranks of one host may ask at once: one compiles, the others wait for it. The compiler holds the
    lock as well, so that one whose rank was killed is waited for before anybody cleans up behind it.

    Args:
        source: A file of C++ (``.cc``), as :data:`HOST_STORE` is, or of C (``.c``).
        version: TensorFlow's version; empty where the library needs nothing of TensorFlow's.
        compile_flags: ``tf.sysconfig.get_compile_flags()``, or none.
        link_flags: ``tf.sysconfig.get_link_flags()``, or none.
        root: The cache, as :func:`cache_root` gives it.
        run: What starts the compiler.

    Raises:
        BuildError: If there is no compiler, it fails, or the cache is not ours to trust or to write.
    """
    home = root / library_key(version, compile_flags, source.read_bytes())
    try:
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
        _require_own(home)
        with _locked(home / "lock") as lock:
            library = home / f"{source.stem}.so"
            if not library.exists():
                _remove_leftovers(home)
                _compile(
                    source, library, [*compile_flags, *FLAGS], link_flags, partial(run, pass_fds=(lock,))
                )
            _require_own(library)
            return library
    except OSError as error:
        raise BuildError(f"cannot use the cache {root}: {error.strerror or error}; set LMS_CACHE") from error


def _require_own(path: Path) -> None:
    """Refuse code that another user owns or may write: what we load must be ours."""
    found = path.stat()
    if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise BuildError(
            f"{path} can be changed by other users; remove it, or set LMS_CACHE to a private directory"
        )


@contextmanager
def _locked(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        os.close(descriptor)


def _remove_leftovers(home: Path) -> None:
    """Remove what a killed build has left; we hold the lock, so no build writes to it any more."""
    for unfinished in home.glob(f"*{PARTIAL}"):
        unfinished.unlink(missing_ok=True)


def _compile(
    source: Path,
    library: Path,
    compile_flags: Sequence[str],
    link_flags: Sequence[str],
    run: Callable[..., "subprocess.CompletedProcess[str]"],
) -> None:
    language = LANGUAGES[source.suffix]
    compiler = next(filter(None, map(shutil.which, language.compilers)), None)
    if compiler is None:
        wanted = ", ".join(language.compilers)
        raise BuildError(f"no {language.name} compiler found ({wanted}); {language.remedy}")
    descriptor, unfinished = tempfile.mkstemp(dir=library.parent, suffix=PARTIAL)
    os.close(descriptor)
    argv = [compiler, *FLAGS, *compile_flags, *language.flags, str(source), "-o", unfinished, *link_flags]
    try:
        done = run(argv, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=False)
        if done.returncode != 0:
            line = next((line for line in done.stderr.splitlines() if "error: " in line), done.stderr[-200:])
            raise BuildError(f"{Path(compiler).name} could not compile {source.name}: {line.strip()}")
        os.chmod(unfinished, 0o700)
        os.replace(unfinished, library)
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"compiling {source.name} took more than {BUILD_TIMEOUT_S:.0f} s") from error
    finally:
        Path(unfinished).unlink(missing_ok=True)
