"""The rank's end of the channel to its job's supervisor."""

import os
import select
import socket
import time
from collections.abc import Mapping

from launch.channel.messages import VARIABLE, Reader, encode
from launch.model.rank_variables import CONTROL_KEY

_LIMIT_S = 2.0
"""For all addresses together; behind a firewall that drops packets nobody answers."""
_MAX_ADDRESSES = 4
_ANSWER_LIMIT_S = 5.0
"""For the supervisor's answer, where a machine is busy."""


class Supervisor:
    """A connection to the supervisor of this rank's job.

    Attributes:
        open: Whether it is there; it is gone for good once it is not.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket, self._reader = connection, Reader()
        self.open = True

    @property
    def sees_us(self) -> bool:
        """Whether it is reached by a socket of this host, and can look at our processes itself."""
        return self._socket.family == socket.AF_UNIX

    def fileno(self) -> int:
        """Return the descriptor to watch."""
        return self._socket.fileno()

    def answers(self) -> bool:
        """Wait for the first answer, which is left to ``receive``, and tell whether it comes soon."""
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        return bool(poller.poll(_ANSWER_LIMIT_S * 1000))

    def receive(self) -> list[dict[str, object]]:
        """Read what has come; nothing, and ``open`` is false, when the supervisor is gone."""
        try:
            data = self._socket.recv(4096)
            if data:
                return self._reader.feed(data)
        except (OSError, ValueError):
            pass
        self.open = False
        return []

    def tell(self, message: Mapping[str, object]) -> None:
        """Send a message, if anybody is there."""
        try:
            self._socket.sendall(encode(message))
        except OSError:
            self.open = False


def find_supervisor(environ: Mapping[str, str], rank: int) -> Supervisor | None:
    """Connect to the supervisor of this rank's job, and say who we are; None where there is none to reach."""
    connection = _connect(environ.get(VARIABLE, ""))
    if connection is None:
        return None
    connection.settimeout(_LIMIT_S)
    supervisor = Supervisor(connection)
    supervisor.tell({**_introduce(environ, rank), "pid": os.getpid()})
    return supervisor if supervisor.open else None


def open_stream(environ: Mapping[str, str], rank: int, name: str) -> socket.socket | None:
    """Open a way of its own to the supervisor for a stream of this rank's program; None: it takes none.

    Args:
        environ: The rank's.
        rank: Its number; the supervisor has to have answered it.
        name: ``stdout`` or ``stderr``.
    """
    connection = _connect(environ.get(VARIABLE, ""))
    if connection is None:
        return None
    connection.settimeout(_ANSWER_LIMIT_S)
    try:
        connection.sendall(encode({**_introduce(environ, rank), "stream": name}))
        if connection.recv(4096):
            connection.setblocking(False)
            return connection
    except OSError:
        pass
    connection.close()
    return None


def _introduce(environ: Mapping[str, str], rank: int) -> dict[str, object]:
    return {"job": environ.get(CONTROL_KEY) or environ.get("LMSRUN_JOB_ID", ""), "rank": rank}


def _connect(address: str) -> socket.socket | None:
    if not address:
        return None
    return _connect_here(address) if address.startswith("/") else _connect_there(address)


def _connect_here(path: str) -> socket.socket | None:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # By way of a descriptor, for a socket's path may have 107 bytes only.
        folder = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY)
        try:
            connection.connect(f"/proc/self/fd/{folder}/{os.path.basename(path)}")
        finally:
            os.close(folder)
    except OSError:
        connection.close()
        return None
    return connection


def _connect_there(addresses: str) -> socket.socket | None:
    tried = addresses.split(",")[:_MAX_ADDRESSES]
    end = time.monotonic() + _LIMIT_S
    for left, address in zip(range(len(tried), 0, -1), tried, strict=True):
        host, _, port = address.partition(" ")
        try:
            # What one does not use of its share is the others'.
            share_s = max(0.0, end - time.monotonic()) / left
            connection = socket.create_connection((host, int(port)), timeout=share_s)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        except (OSError, ValueError):
            continue
        return connection
    return None
