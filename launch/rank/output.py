"""The two output files of a rank that another launcher started, written on the rank's own host.

That launcher mixes what its ranks print before lmsrun sees it. So the shim, which stays as the program's
parent, stands in between: every byte goes on to the launcher's stream and into the rank's file.
"""

import fcntl
import os
import select
import sys
import termios
from collections.abc import Mapping

from launch.model.errors import UsageError
from launch.receipts.lines import ReceiptSieve
from launch.system.output_file import open_output

_STREAMS = {1: "stdout", 2: "stderr"}
_CHUNK = 1 << 16


class Tee:
    """One stream of the program: a pipe from it, the launcher's stream, and a file.

    Attributes:
        source: The end of the pipe that we read.
        error: Why the file ends early, if it does.
    """

    def __init__(self, fd: int, file_fd: int, name: str, sieve: ReceiptSieve) -> None:
        self.source, self._sink = os.pipe()
        self.name = name
        self.error: OSError | None = None
        self._fd, self._file_fd, self._sieve = fd, file_fd, sieve

    def become_output(self) -> None:
        """In the child: what it writes to this stream comes to us."""
        os.dup2(self._sink, self._fd)

    def start(self) -> None:
        """In the parent: from now on only the program holds the pipe's other end."""
        os.close(self._sink)

    def leave(self) -> None:
        """In whoever has nothing to do with it: hold neither end."""
        os.close(self.source)
        os.close(self._sink)
        os.close(self._file_fd)

    def pump(self, most: int = _CHUNK) -> int:
        """Read once and pass it on; returns how many bytes, 0 at the end of the stream."""
        data = os.read(self.source, most)
        self._save(self._sieve.feed(data) if data else self._sieve.finish())
        try:
            _write(self._fd, data)
        except OSError:
            # Nobody reads any more: the program is to learn it as it would have without us.
            data = b""
        if not data:
            os.close(self.source)
        return len(data)

    def drain(self) -> None:
        """Pass on what the pipe holds now; what a daemon of the program writes later is not waited for."""
        left = _count_waiting(self.source)
        while left > 0 and (passed := self.pump(min(left, _CHUNK))):
            left -= passed
        self._save(self._sieve.finish())

    def _save(self, data: bytes) -> None:
        if self.error is not None:
            return
        try:
            _write(self._file_fd, data)
        except OSError as error:
            self.error = error


def open_tees(environ: Mapping[str, str], rank: int, folder: str) -> list[Tee]:
    """Open a tee per stream, whose files lie in ``folder``.

    Raises:
        UsageError: If the folder or a file cannot be written, or a file is none.
    """
    comes_back = environ.get("HOROVOD_ELASTIC") or any(
        environ.get(name, "0") != "0" for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
    )
    # In an elastic job a number may come back with another process, in one that is restarted all do.
    late = os.O_APPEND if comes_back else os.O_TRUNC
    is_own_folder = bool(environ.get("LMSRUN_JOB_ID"))  # made for this job by lmsrun, which has started it
    tees = []
    try:
        os.makedirs(folder, exist_ok=True)
        for fd, stream in _STREAMS.items():
            path = os.path.join(folder, f"rank-{rank}.{stream}")
            if not (comes_back or is_own_folder):
                _refuse_to_empty(path)
            file_fd = open_output(path, late)
            tees.append(Tee(fd, file_fd, path, ReceiptSieve(environ.get("LMSRUN_JOB_ID", ""), None)))
    except OSError as error:
        host = os.uname().nodename
        raise UsageError(
            f"cannot write to the output folder {folder} on {host}: {error.strerror}; "
            "choose another --output-dir"
        ) from error
    return tees


def _refuse_to_empty(path: str) -> None:
    """Refuse a file that holds something.

    Raises:
        UsageError: If it does.
    """
    if os.path.isfile(path) and os.path.getsize(path):
        raise UsageError(
            f"{path} holds the output of another job or step; choose another folder with "
            "LMSRUN_OUTPUT_DIR, such as one with the job's number in its name"
        )


def _count_waiting(pipe: int) -> int:
    """How many bytes could be read at once (ioctl_pipe: FIONREAD)."""
    return int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)), sys.byteorder)


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except BlockingIOError:
            # The launcher has made its end of the stream non-blocking, and with it ours.
            _wait_for_room(fd)


def _wait_for_room(fd: int) -> None:
    poller = select.poll()
    poller.register(fd, select.POLLOUT)
    poller.poll()
