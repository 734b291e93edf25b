"""The file that keeps the output of a rank, opened only where opening it cannot block."""

import errno
import os
import stat

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
            raise UsageError(
                f"{os.fspath(path)} is a link of another user, who may lead it anywhere; "
                "remove it, or choose another --output-dir"
            ) from None
        raise


def _is_own_link(path: str | os.PathLike[str]) -> bool:
    return os.path.islink(path) and os.lstat(path).st_uid in (os.geteuid(), 0)


def _takes_bytes(mode: int) -> bool:
    return stat.S_ISREG(mode) or stat.S_ISCHR(mode)
