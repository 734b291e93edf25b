"""Find the libraries that were built with the package, each from one file of C that lies beside it."""

from collections.abc import Iterator
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path


def find_prebuilt(source: Path) -> Iterator[Path]:
    """Yield the libraries that may have been built from ``source``; there is none without a C compiler."""
    for suffix in EXTENSION_SUFFIXES:
        if (path := source.with_name(f"_{source.stem}{suffix}")).exists():
            yield path
