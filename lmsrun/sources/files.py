"""The TOML files that options stand in: of the site, of the user, of a folder; the later one wins."""

import errno
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from launch.model.errors import UsageError
from lms.user_files import parse_toml, read_text_file

SITE_FILE = Path("/etc/lmsrun.toml")
FILE_NAMES = ("lmsrun.toml", "pyproject.toml")
"""In a folder; the first that is there counts."""
_MAY_NAME_US = re.compile(
    r"""^[ \t]*(\[[ \t]*)?["']?tool["']?[ \t]*(\.[ \t]*["']?lmsrun\b|\]|=)""", re.MULTILINE
)
"""Any spelling of our table in ``pyproject.toml``; most projects have none and need not be parsed."""
_LMS_KEY = re.compile(r"^lms[ \t]*=", re.MULTILINE)
_LMS_TABLE = re.compile(r"^\[(tool\.lmsrun\.)?lms\]", re.MULTILINE)


@dataclass(frozen=True)
class OptionsFile:
    """One file's table of options."""

    name: str
    """For people, such as ``pyproject.toml [tool.lmsrun]``."""
    path: Path
    table: dict[str, Any]
    status: os.stat_result
    """Of the file that was read, whatever the path leads to by now."""
    is_asked: bool = False
    """Whether the user has named it himself."""
    is_of_folder: bool = False
    """Whether it counts because of the current folder; ``--config`` takes its place."""

    def refuse_others_texts(self, texts: Sequence[str]) -> None:
        """Refuse texts of somebody else: they could have this user start, write or connect to what he likes.

        Switches, numbers and words that are declared name nothing outside of lmsrun, and may stand there.

        Args:
            texts: The keys of the file whose values are free texts.

        Raises:
            UsageError: If another user than this one or root owns the file or can write it.
        """
        if self.is_asked or not texts:
            return
        found, named = self.status, ", ".join(texts)
        remedy = "look at it, then have it belong to you or root"
        if self.is_of_folder:
            remedy = f"look at it, then give --config {self.path}, or go to another folder"
        if found.st_uid not in (os.geteuid(), 0):
            raise UsageError(
                f"{self.name} belongs to user {found.st_uid} and says what to start or where ({named}); "
                f"{remedy}"
            )
        by_group = found.st_mode & stat.S_IWGRP and found.st_gid not in (0, os.getegid())
        if found.st_mode & stat.S_IWOTH or by_group:
            raise UsageError(
                f"{self.name} can be written by others and says what to start or where ({named}); "
                f"look at it, then chmod go-w {self.path}"
            )


def read_files(
    asked: Path | None, environ: Mapping[str, str], folder: Path, site: Path | None = None
) -> tuple[OptionsFile, ...]:
    """Read all files that count, from the weakest to the strongest.

    Args:
        asked: The file of ``--config``, which stands in for those of the folder.
        environ: Where ``XDG_CONFIG_HOME`` and ``HOME`` are.
        folder: Where ``lmsrun.toml``, else ``pyproject.toml`` is looked for.
        site: The file of all users; None: that of this machine.

    Raises:
        UsageError: If one cannot be read or is not TOML.
    """
    everywhere = filter(_is_there, _everywhere(environ, site or SITE_FILE))
    files = [read_file(path, str(path)) for path in everywhere]
    if asked is not None:
        files.append(read_file(asked, str(asked), is_asked=True))
    else:
        found = next((folder / name for name in FILE_NAMES if _is_there(folder / name)), None)
        files += [] if found is None else [replace(read_file(found, found.name), is_of_folder=True)]
    return tuple(file for file in files if file.table)


def _is_there(path: Path) -> bool:
    """Tell whether there is a file; false also where none may enter.

    Raises:
        UsageError: If there is a link to nothing, or what is no file: somebody means to have options there.
    """
    is_shared = path.name == "pyproject.toml"  # which is there for others, too
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        if os.path.islink(path) and not is_shared:
            raise UsageError(
                f"{path} is a link to {os.readlink(path)}, which is not there; remove it, or mend it"
            ) from None
        return False
    except OSError as error:  # where none may enter
        if error.errno == errno.ELOOP and os.path.islink(path) and not is_shared:
            raise _refusal("a link to itself", path) from None
        return False
    if stat.S_ISREG(mode):
        return True
    if os.path.samefile(path, os.devnull):  # a link that hides a file
        return False
    kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket"}
    raise _refusal(kinds.get(stat.S_IFMT(mode), "a device"), path)


def _refusal(kind: str, path: Path) -> UsageError:
    return UsageError(f"{path} is {kind}; needed a TOML file: remove it, or put one in its place")


def _everywhere(environ: Mapping[str, str], site: Path) -> Iterator[Path]:
    yield site
    home = environ.get("HOME", "")
    # The specification: a relative path is to be ignored.
    base = environ.get("XDG_CONFIG_HOME", "")
    if os.path.isabs(base):
        yield Path(base) / "lmsrun.toml"
    elif os.path.isabs(home):
        yield Path(home) / ".config" / "lmsrun.toml"


def read_file(path: Path, name: str, is_asked: bool = False) -> OptionsFile:
    """Read the options' table of one file, empty where a ``pyproject.toml`` has none.

    Raises:
        UsageError: If the file cannot be read or is not TOML.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            status, text = os.fstat(fd), read_text_file(Path(f"/proc/self/fd/{fd}"))
        finally:
            os.close(fd)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise UsageError(f"cannot read {path}: {why}; needed a TOML file") from None
    is_project = path.name == "pyproject.toml"
    if is_project and not _MAY_NAME_US.search(text):
        return OptionsFile(name, path, {}, status)
    try:
        table = parse_toml(text)
    except ValueError as error:
        both = "; lms = ... and [lms] exclude each other: write enabled = true in [lms]"
        key = _LMS_KEY.search(text)
        hint = both if key and _LMS_TABLE.search(text, key.end()) else ""
        raise UsageError(f"{path} {error}{hint}") from None
    if is_project:
        table = table.get("tool", {}).get("lmsrun", {}) if isinstance(table.get("tool"), dict) else {}
        name = f"{path.name} [tool.lmsrun]"
    if not isinstance(table, dict):
        raise UsageError(f"{name} is not a table of options")
    return OptionsFile(name, path, table, status, is_asked)
