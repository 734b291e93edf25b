"""Files that are written: for the output of a rank, opened only where that cannot block, and as a whole."""

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path

from launch.model.errors import UsageError


def open_output(path: str | os.PathLike[str], late: int = os.O_TRUNC) -> int:
    """Open a file for a rank's output.

    Args:
        path: Where it lies; also a link to a file, or to a device such as ``/dev/null``.
        late: ``os.O_TRUNC``, or ``os.O_APPEND`` where others may have written to it before.

    Returns:
        Its descriptor.

    Raises:
        UsageError: If something else lies there: a named pipe would wait for a reader, and the job with it,
            and a link of another user may lead anywhere.
        OSError: If it cannot be opened.
    """
    if os.path.exists(path) and not _takes_bytes(os.stat(path).st_mode):
        raise UsageError(
            f"{os.fspath(path)} is no file, and output is to be kept there; "
            "remove it, or choose another --output-dir"
        )
    own = 0 if _is_own_link(path) else os.O_NOFOLLOW
    try:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | late | own, 0o666)
    except OSError as error:
        if own and error.errno == errno.ELOOP:
            raise _refusal_of_link(path, "choose another --output-dir") from None
        raise


def write_whole(path: str | os.PathLike[str], text: str) -> None:
    """Write the file that a user has named as a whole; a link leads to it.

    What is no file (a device, a pipe) is written as it is. So is a file that cannot be replaced: one of
    another user, with another name, or in a folder that takes no other.

    Raises:
        OSError: If it cannot be written.
    """
    mode = _mode_to_keep(path)
    if mode is None:
        Path(path).write_text(text, encoding="utf-8")
    else:
        replace_file(Path(os.path.realpath(path)), text, mode)


def write_unnamed(path: str | os.PathLike[str], text: str, instead: str) -> None:
    """Write a file whose name the user has not given as a whole; a link leads to it if it is his or root's.

    Args:
        path: The file.
        text: What it is to hold.
        instead: What to do instead of removing a link.

    Raises:
        UsageError: If a link of another user lies there.
        OSError: If it cannot be written.
    """
    if _is_own_link(path):
        write_whole(path, text)
        return
    if os.path.islink(path):
        raise _refusal_of_link(path, instead)
    # Also where it is not ours alone: that follows no link which somebody puts there meanwhile.
    replace_file(Path(path), text, (_mode_to_keep(path) or 0) & 0o777)


def replace_file(path: Path, text: str, mode: int = 0) -> None:
    """Put a file in the place of what is there, also of a link: a reader sees that or all of the text.

    Args:
        path: The file; where it is a mount of its own it is written there.
        text: What it is to hold.
        mode: Its permissions; 0 for the usual ones.

    Raises:
        OSError: If it cannot be written; what was there stays.
    """
    draft = path.with_name(f".lmsrun-{os.getpid()}")
    try:
        draft.unlink(missing_ok=True)  # of a process that was killed and had the same number
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        with open(fd, "w", encoding="utf-8") as file:
            if mode:
                os.fchmod(fd, mode)
            file.write(text)
        _rename(draft, path)
    except OSError as error:
        # A write that fails names no file.
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        with suppress(OSError):
            draft.unlink()


def _mode_to_keep(path: str | os.PathLike[str]) -> int | None:
    """Return the mode of the file that may be replaced, 0 for a new one; ``None``: write in its place."""
    try:
        there = os.stat(path)
    except FileNotFoundError:
        return 0
    is_own = stat.S_ISREG(there.st_mode) and there.st_uid == os.geteuid() and there.st_nlink == 1
    folder = os.path.dirname(os.path.realpath(path))
    may_replace = is_own and os.access(path, os.W_OK) and os.access(folder, os.W_OK)
    return stat.S_IMODE(there.st_mode) if may_replace else None


def _rename(draft: Path, target: Path) -> None:
    """Put a draft in the place of a file; where that is a mount of its own, write it there."""
    try:
        draft.replace(target)
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise
        target.write_bytes(draft.read_bytes())


def _refusal_of_link(path: str | os.PathLike[str], instead: str) -> UsageError:
    return UsageError(
        f"{os.fspath(path)} is a link of another user, who may lead it anywhere; remove it, or {instead}"
    )


def _is_own_link(path: str | os.PathLike[str]) -> bool:
    return os.path.islink(path) and os.lstat(path).st_uid in (os.geteuid(), 0)


def _takes_bytes(mode: int) -> bool:
    return stat.S_ISREG(mode) or stat.S_ISCHR(mode)
