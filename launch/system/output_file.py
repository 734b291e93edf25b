"""The file that keeps the output of a rank, opened only where opening it cannot block."""

import errno
import os
import stat
from pathlib import Path

from launch.model.errors import UsageError

_LONGEST_NAME = 200
"""Of the 255 bytes that file systems take, without the process id."""


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
            raise UsageError(
                f"{os.fspath(path)} is a link of another user, who may lead it anywhere; "
                "remove it, or choose another --output-dir"
            ) from None
        raise


def write_whole(path: str | os.PathLike[str], text: str) -> None:
    """Write a file as a whole: a reader sees what was there or all of the text, also on a full disk.

    What is no file (a device, a pipe) is written as it is, and so is a file in a folder that takes no other.

    Raises:
        OSError: If it cannot be written.
    """
    target = Path(os.path.realpath(path))
    draft = target.with_name(f".{target.name[:_LONGEST_NAME]}.{os.getpid()}")
    is_new = not target.exists()
    may_replace = is_new or (target.is_file() and os.access(target.parent, os.W_OK))
    if not may_replace:
        target.write_text(text, encoding="utf-8")
        return
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        with open(fd, "w", encoding="utf-8") as file:
            if not is_new:
                os.fchmod(fd, stat.S_IMODE(target.stat().st_mode))
            file.write(text)
        draft.replace(target)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def _is_own_link(path: str | os.PathLike[str]) -> bool:
    return os.path.islink(path) and os.lstat(path).st_uid in (os.geteuid(), 0)


def _takes_bytes(mode: int) -> bool:
    return stat.S_ISREG(mode) or stat.S_ISCHR(mode)
