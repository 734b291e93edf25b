"""Check files and folders that a user names, before any work depends on them, and read small ones.

A file may be hostile. Nothing here imports TensorFlow.
"""

import importlib
import os
import re
import stat
import sys
from pathlib import Path
from typing import Any

from lms.errors import PlaceError

LARGEST_FILE_BYTES = 16 << 20
"""A hostfile of 100,000 hosts has 3 MiB; a device that never ends is no such file."""
LARGEST_CHARS, MOST_PARTS = 1 << 20, 32
"""Bound a TOML file: far more than options need. The parser's time grows with the square of a key's parts."""
_PART = r"""(?:[\w-]+|"(?:[^"\\\n]|\\.){0,99}"|'[^'\n]{0,99}')"""  # bounded: of longer ones few fit
_LONG_KEY = rf"(?m)(?:^|[\[{{,])[ \t]*{_PART}(?:[ \t]*\.[ \t]*{_PART}){{{MOST_PARTS}}}"
"""Compiled only for a file, as the parser is imported."""


def require_file(path: Path, what: str) -> None:
    """Check that a file can be written at ``path``; nothing is made.

    Args:
        path: Where it shall lie.
        what: Who asks for it, as in ``stats_file (LMS_STATS_FILE)``.

    Raises:
        PlaceError: If it cannot; the text says why and what to give.
    """
    why = _why_no_file(path)
    if why:
        raise PlaceError(
            f"cannot write {os.fspath(path)!r}: {why}; needed in {what}: a file in a folder that exists and "
            "can be written to"
        )


def require_folder(path: Path, what: str) -> None:
    """Check that files can be made in ``path``.

    Raises:
        PlaceError: If they cannot; the text says why and what to give.
    """
    why = _why_no_folder(path)
    if why:
        raise PlaceError(
            f"cannot make files in {os.fspath(path)!r}: {why}; needed in {what}: a folder that exists and "
            "can be written to"
        )


def _why_no_file(path: Path) -> str:
    if os.path.isdir(path):
        return "it is a folder"
    if os.path.exists(path):
        if stat.S_ISFIFO(os.stat(path).st_mode):
            return "it is a pipe, which waits for somebody to read it"
        return "" if os.access(path, os.W_OK) else "it cannot be changed"
    return _why_no_folder(path.parent)


def _why_no_folder(path: Path) -> str:
    # os.path, because the methods of Path raise where a folder on the way may not be looked into.
    if not os.path.exists(path):
        return f"there is no folder {os.fspath(path)!r}"
    if not os.path.isdir(path):
        return f"{os.fspath(path)!r} is no folder"
    return "" if os.access(path, os.W_OK | os.X_OK) else f"{os.fspath(path)!r} cannot be written to"


def read_text_file(path: Path) -> str:
    """Read the text of a file or pipe.

    Raises:
        OSError: If it cannot be read.
        ValueError: If it is larger than ``LARGEST_FILE_BYTES``, or no UTF-8.
    """
    with path.open("rb") as file:
        data = file.read(LARGEST_FILE_BYTES + 1)
    if len(data) > LARGEST_FILE_BYTES:
        raise ValueError(f"larger than {LARGEST_FILE_BYTES >> 20} MiB; needed a small text file")
    return data.decode("utf-8-sig")  # Editors of Windows put a mark in front.


def parse_toml(text: str) -> dict[str, Any]:
    """Parse the TOML of a file of options.

    Raises:
        ValueError: If it is no TOML, or more than options need; the text goes on behind the file's name.
    """
    if len(text) > LARGEST_CHARS:
        raise ValueError(f"is larger than {LARGEST_CHARS >> 20} MiB; needed a small TOML file")
    if found := re.search(_LONG_KEY, text, re.ASCII):
        line = text.count("\n", 0, found.start()) + 1
        raise ValueError(f"has a key of more than {MOST_PARTS} parts in line {line}; needed fewer")
    # Imported only for a file, for it takes as long as all of the other imports of the options together.
    parser = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    try:
        table: dict[str, Any] = parser.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not TOML: {error}") from error
    return table
