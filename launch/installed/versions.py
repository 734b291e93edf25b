"""Read which versions of packages are installed for this Python, without importing them."""

import importlib.metadata
from collections.abc import Callable

TENSORFLOW_DISTRIBUTIONS = (
    "tensorflow",
    "tensorflow-cpu",
    "tensorflow-gpu",
    "tensorflow-rocm",
    "intel-tensorflow",
)


def read_version(distribution: str) -> str | None:
    """Return the version of a distribution; ``None`` when it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def read_tensorflow_version(read: Callable[[str], str | None] = read_version) -> str | None:
    """Return TensorFlow's version, whichever distribution it came in.

    Args:
        read: Returns the version of a distribution.
    """
    return next(filter(None, map(read, TENSORFLOW_DISTRIBUTIONS)), None)
