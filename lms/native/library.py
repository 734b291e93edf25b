"""Load the compiled ops, each library once in a process."""

import ctypes
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tensorflow as tf

from lms.errors import BuildError
from lms.native.build import build_library, cache_root


@dataclass(frozen=True)
class Library:
    """The contents of one compiled file of ``lms/ops``."""

    ops: Any
    """The ops, as functions of Python."""
    calls: Any
    """The plain C functions."""


def load_library(source: Path, environ: Mapping[str, str]) -> Library:
    """Compile the ops if the cache does not hold them, and load them.

    Args:
        source: One of the source files of :mod:`lms.native.build`.
        environ: Where the cache is looked up.

    Raises:
        BuildError: If they cannot be compiled or loaded.
    """
    path = build_library(
        source,
        tf.__version__,
        tf.sysconfig.get_compile_flags(),
        tf.sysconfig.get_link_flags(),
        cache_root(environ),
    )
    return _load(str(path))


@functools.cache
def _load(path: str) -> Library:
    try:
        return Library(tf.load_op_library(path), ctypes.CDLL(path))
    except (tf.errors.OpError, OSError, RuntimeError) as error:
        raise BuildError(
            f"{path} cannot be loaded ({str(error).splitlines()[0]}); remove it, or set LMS_CACHE to a "
            "directory whose files may be executed"
        ) from error
