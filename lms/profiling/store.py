"""Keep the measured times of a step's ops in the user's cache, by the graph and the machine.

A file is taken for hostile until it has been checked: it must be the user's own, of limited size, JSON of the
right form, and hold nothing but times.
"""

import hashlib
import json
import os
import stat
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lms.config import CACHE_VARIABLE
from lms.errors import BuildError, LMSError
from lms.ir.graph import Graph
from lms.native.build import user_cache

VERSION = 1
MOST_BYTES = 32 << 20
"""Of a file."""
MOST_OPS = 200_000
MOST_NAME = 4096
"""Characters of an op's name."""
MOST_SECONDS = 3600.0
"""Of one op."""


class ProfileError(LMSError):
    """A profile that cannot be measured, read or kept."""


def profile_folder(environ: Mapping[str, str]) -> Path | None:
    """Return ``$LMS_CACHE/profiles``, else ``lmsrun/profiles`` in the user's cache, if there is one."""
    if own := environ.get(CACHE_VARIABLE):
        return Path(own) / "profiles"
    try:
        return user_cache(environ) / "profiles"
    except BuildError:
        return None


def signature(graph: Graph, machine: Sequence[str]) -> str:
    """Return the name of a profile: it changes with the ops, their sizes and inputs, and with the machine.

    Args:
        graph: The step as it was read.
        machine: What else the times depend on.
    """
    digest = hashlib.sha256(repr((VERSION, tuple(machine))).encode())
    sizes = [tensor.nbytes for tensor in graph.tensors]
    for op in graph.ops:
        made = [sizes[tensor] for tensor in op.outputs]
        digest.update(repr((op.name, op.type, op.inputs, made)).encode())
    return digest.hexdigest()


class Profiles:
    """The profiles of a machine.

    Args:
        folder: Where they lie; ``None``: nowhere, and none is found.
        machine: What the times depend on besides the graph.
        warn: Is told of a file that cannot be used.
    """

    def __init__(self, folder: Path | None, machine: Sequence[str], warn: Callable[[str], None]) -> None:
        self.folder, self._machine, self._warn = folder, tuple(machine), warn
        self.kept = 0
        """How many have been kept by this process."""

    def find(self, graph: Graph) -> dict[str, float]:
        """Return the seconds of a graph's ops by name; empty where none were measured, or can be used."""
        if self.folder is None or not self.folder.is_dir():
            return {}
        path = self.folder / f"{signature(graph, self._machine)}.json"
        try:
            return read_profile(path)
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            return {}  # where the folder cannot be entered nothing was measured
        except (OSError, ProfileError) as error:
            self._warn(f"the profile {path} is not used, times are estimated: {error}")
            return {}

    def prepare(self) -> Path:
        """Make the folder, if there is none; return it.

        Raises:
            ProfileError: If no profile could be kept there.
        """
        if self.folder is None:
            raise ProfileError("the user has no home directory for profiles; set LMS_CACHE")
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise self._unwritable(error.strerror or str(error)) from error
        if not os.access(self.folder, os.W_OK | os.X_OK):
            raise self._unwritable("no right to write there")
        return self.folder

    def _unwritable(self, why: str) -> ProfileError:
        return ProfileError(f"cannot keep the profile in {self.folder}: {why}; set LMS_CACHE")

    def keep(self, graph: Graph, seconds: Mapping[str, float]) -> Path:
        """Write the seconds of a graph's ops, in place of earlier ones; return the file.

        Raises:
            ProfileError: If there is no folder for it, or it cannot be written.
        """
        path = self.prepare() / f"{signature(graph, self._machine)}.json"
        try:
            write_profile(path, seconds)
        except OSError as error:
            raise self._unwritable(error.strerror or str(error)) from error
        self.kept += 1
        return path


def write_profile(path: Path, seconds: Mapping[str, float]) -> None:
    """Write a profile at once: who reads meanwhile sees the old one or the new one.

    Raises:
        OSError: If it cannot be written.
    """
    document = {"version": VERSION, "seconds": {name: round(one, 9) for name, one in seconds.items()}}
    handle, made = tempfile.mkstemp(dir=path.parent, prefix=".profile-")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(document, file)
        os.replace(made, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(made)
        raise


def read_profile(path: Path) -> dict[str, float]:
    """Read and check a profile.

    Raises:
        OSError: If it cannot be read.
        ProfileError: If it is no profile, or others could have written it.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ProfileError("it is no file")
        if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise ProfileError("other users could have written it")
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise ProfileError(f"it is larger than {MOST_BYTES >> 20} MiB")
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ProfileError("it is no JSON") from error
    return _checked(found)


def _checked(found: Any) -> dict[str, float]:
    if not isinstance(found, dict) or found.get("version") != VERSION:
        raise ProfileError(f"it is no profile of version {VERSION}")
    seconds = found.get("seconds")
    if not isinstance(seconds, dict) or not 0 < len(seconds) <= MOST_OPS:
        raise ProfileError(f"needed the times of 1 to {MOST_OPS:,} ops")
    for name, one in seconds.items():
        if len(name) > MOST_NAME or isinstance(one, bool) or not isinstance(one, int | float):
            raise ProfileError("it holds something else than times of ops")
        if not 0 <= one <= MOST_SECONDS:  # false for NaN, too
            raise ProfileError(f"an op takes no time from 0 to {MOST_SECONDS:.0f} s")
    return {name: float(one) for name, one in seconds.items()}
