"""The file that keeps the output of a rank, opened only where opening it cannot block."""

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
        UsageError: If something else lies there: a named pipe would wait for a reader, and the job with it.
        OSError: If it cannot be opened.
    """
    if os.path.exists(path) and not _takes_bytes(os.stat(path).st_mode):
        raise UsageError(
            f"{os.fspath(path)} is no file, and output is to be kept there; "
            "remove it, or choose another --output-dir"
        )
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | late, 0o666)


def _takes_bytes(mode: int) -> bool:
    return stat.S_ISREG(mode) or stat.S_ISCHR(mode)
