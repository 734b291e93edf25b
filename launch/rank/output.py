"""The output of a rank that another launcher started, as its keeper carries it.

That launcher would mix what its ranks print, and some lose lines of it. So the keeper stands in between:
every byte goes to the supervisor of the job, or where that cannot be reached to the launcher's stream, and,
if output is kept, into the rank's own file on the rank's own host.
"""

import fcntl
import os
import select
import socket
import sys
import termios
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

from launch.channel.client import open_stream
from launch.channel.messages import STREAMS
from launch.model.errors import UsageError

if TYPE_CHECKING:
    from launch.receipts.lines import ReceiptSieve

_CHUNK = 1 << 16


class Tee:
    """One stream of the program: a pipe from it, where it goes on to, and a file if it is kept.

    Attributes:
        fd: The stream's number, in the program and in the launcher.
        connection: The way to the supervisor; None: what comes goes on to the launcher.
        source: The end of the pipe that we read; -1 once nothing more is read.
        error: Why the file ends early, if it does.
    """

    def __init__(
        self,
        fd: int,
        connection: socket.socket | None = None,
        file_fd: int = -1,
        name: str = "",
        sieve: "ReceiptSieve | None" = None,
    ) -> None:
        """Stand in for a stream.

        Args:
            fd: See above.
            connection: See above.
            file_fd: A file for it; -1: none.
            name: The file's.
            sieve: Takes out what is not for the file.
        """
        self.source, self._sink = os.pipe()
        self.name = name
        self.error: OSError | None = None
        self.connection = connection
        self._waiting = b""
        self.fd, self._file_fd, self._sieve = fd, file_fd, sieve

    @property
    def sink(self) -> int:
        """The descriptor that has to take what waits before more is read; -1: nothing waits."""
        return self.connection.fileno() if self.connection is not None and self._waiting else -1

    def become_output(self) -> None:
        """In the child: what it writes to this stream comes to us."""
        os.dup2(self._sink, self.fd)

    def start(self) -> None:
        """In the parent: from now on only the program holds the pipe's other end."""
        os.close(self._sink)

    def leave(self) -> None:
        """In whoever has nothing to do with it: hold neither end."""
        os.close(self.source)
        os.close(self._sink)
        os.close(self._file_fd)

    def pump(self, most: int = _CHUNK) -> int:
        """Read once and pass it on; returns how many bytes, 0 at the end of the stream and from then on."""
        if self.source < 0:
            return 0
        data = os.read(self.source, most)
        self._save(data)
        try:
            if self.connection is None:
                _write(self.fd, data)
            else:
                self._waiting += data
                self._send()
        except OSError:
            # Nobody reads any more: the program is to learn it as it would have without us.
            data = b""
        if not data:
            self._end()
        return len(data)

    def push(self) -> None:
        """Send what waits, as far as it is taken without waiting."""
        try:
            self._send()
        except OSError:
            self._waiting = b""  # Nobody takes it.
            self._end()

    def drain(self) -> None:
        """Pass on what the pipe holds now, as far as it is taken without waiting; ``push`` does the rest.

        What a daemon of the program writes later is not waited for.
        """
        left = _count_waiting(self.source) if self.source >= 0 else 0
        while left > 0 and (passed := self.pump(min(left, _CHUNK))):
            left -= passed
        self._save(b"")

    def _send(self) -> None:
        if self.connection is not None and self._waiting:
            with suppress(BlockingIOError):
                self._waiting = self._waiting[self.connection.send(self._waiting) :]

    def _end(self) -> None:
        if self.source >= 0:
            self._save(b"")
            os.close(self.source)
            self.source = -1

    def _save(self, data: bytes) -> None:
        """Write what is new to the file; nothing: what was held back as well."""
        if self._sieve is None or self.error is not None:
            return
        try:
            _write(self._file_fd, self._sieve.feed(data) if data else self._sieve.finish())
        except OSError as error:
            self.error = error


def carry_output(environ: Mapping[str, str], rank: int, kept: list[Tee]) -> list[Tee]:
    """Have the supervisor take what the program prints, as far as it does; ``kept`` goes to files as well."""
    connections: list[socket.socket] = []
    for stream in STREAMS:
        connection = open_stream(environ, rank, stream)
        if connection is None:
            break  # It would not take the other one either.
        connections.append(connection)
    if not kept:
        return [Tee(fd, connection) for fd, connection in enumerate(connections, 1)]
    for tee, connection in zip(kept, connections, strict=False):
        tee.connection = connection
    return kept


def open_tees(environ: Mapping[str, str], rank: int, folder: str) -> list[Tee]:
    """Open a tee per stream, whose files lie in ``folder``.

    Raises:
        UsageError: If the folder or a file cannot be written, or a file is none.
    """
    from launch.receipts.lines import ReceiptSieve  # Not where nothing is kept.
    from launch.system.output_file import open_output

    comes_back = environ.get("HOROVOD_ELASTIC") or any(
        environ.get(name, "0") != "0" for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
    )
    # In an elastic job a number may come back with another process, in one that is restarted all do.
    late = os.O_APPEND if comes_back else os.O_TRUNC
    is_own_folder = bool(environ.get("LMSRUN_JOB_ID"))  # made for this job by lmsrun, which has started it
    tees = []
    try:
        os.makedirs(folder, exist_ok=True)
        for fd, stream in enumerate(STREAMS, 1):
            path = os.path.join(folder, f"rank-{rank}.{stream}")
            if not (comes_back or is_own_folder):
                _refuse_to_empty(path)
            file_fd = open_output(path, late)
            sieve = ReceiptSieve(environ.get("LMSRUN_JOB_ID", ""), None)
            tees.append(Tee(fd, None, file_fd, path, sieve))
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
