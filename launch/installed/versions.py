"""Read which versions of packages are installed for this Python, without importing them."""

import importlib.metadata

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


def read_tensorflow_version() -> str | None:
    """Return TensorFlow's version, whichever distribution it came in."""
    return next(filter(None, map(read_version, TENSORFLOW_DISTRIBUTIONS)), None)
