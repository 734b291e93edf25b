"""Check files and folders that a user names, before any work depends on them."""

import os
import stat
from pathlib import Path

from lms.errors import PlaceError


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
