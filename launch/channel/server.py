"""The supervisor's end of the channels to the ranks that another launcher has started."""

import errno
import hmac
import os
import socket
import time
from collections.abc import Iterable, Sequence
from math import isfinite
from pathlib import Path

from launch.channel.events import Carried, Ended, Ending, Event, Joined, Lost
from launch.channel.messages import SOCKET, STREAMS, Reader, encode, to_count
from launch.system.process_load import Load

_BACKLOG = 1024
_SILENCE_S = 2.0
"""How long a connection may not say who it is."""
_OLD_S = 12.0
"""How long it counts what a keeper has told of its rank, every five seconds: more than twice that."""
_MAX_STATUS = 1 << 16
_MAX_PID = 1 << 22
_MAX_RANKS = 1 << 20


class _Connection:
    def __init__(self, accepted: socket.socket) -> None:
        self.socket, self.reader = accepted, Reader()
        self.since = time.monotonic()
        self.rank: int | None = None
        self.has_ended = False
        self.is_closed = False


class RankChannel:
    """Listens for ranks, and tells them what to do. Use one a job.

    Attributes:
        programs: The processes of ranks' programs, of those that run on this host.
    """

    def __init__(
        self,
        job_id: str,
        world_size: int,
        grace_s: float,
        is_elastic: bool = False,
        carries_output: bool = False,
    ) -> None:
        """Expect the ranks of a job.

        Args:
            job_id: What they say to show that they are its ranks.
            world_size: How many there are.
            grace_s: The time that they have to end.
            is_elastic: Whether they come and go.
            carries_output: Whether what their programs print may come this way.
        """
        self._job_id, self._world_size, self._grace_s = job_id, world_size, grace_s
        self._is_elastic, self._carries_output = is_elastic, carries_output
        self._listening: list[socket.socket] = []
        self._connections: dict[int, _Connection] = {}
        self._ranks: dict[int, _Connection] = {}
        self._carried: set[tuple[int, str]] = set()
        self.programs: dict[int, int] = {}
        self._loads: dict[int, tuple[float, Load]] = {}
        """By rank when it was told what the rank is at."""

    def listen_here(self, folder: Path) -> str:
        """Listen on a socket in a private folder; returns where ranks find it."""
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            listening.bind(f"/proc/self/fd/{held}/{SOCKET}")
        finally:
            os.close(held)
        self._listen(listening)
        return str(folder / SOCKET)

    def listen_for(self, hosts: Iterable[str]) -> str:
        """Listen for ranks of these hosts; returns where they find us, by our addresses towards them."""
        if socket.has_dualstack_ipv6():
            listening = socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
        else:
            listening = socket.create_server(("", 0))
        self._listen(listening)
        port = listening.getsockname()[1]
        addresses = dict.fromkeys(filter(None, map(_address_towards, (*hosts, os.uname().nodename))))
        return ",".join(f"{address} {port}" for address in addresses)

    def filenos(self) -> list[int]:
        """List the descriptors to watch."""
        return [*(each.fileno() for each in self._listening), *self._connections]

    def serve(self, ready: Iterable[int]) -> list[Event]:
        """Take what has come on these descriptors."""
        events: list[Event] = []
        for fd in ready:
            if fd in self._connections:
                events += self._read(self._connections[fd])
            else:
                self._accept(fd)
        self._drop_silent(time.monotonic() - _SILENCE_S)
        return events

    def signal(self, rank: int, number: int) -> None:
        """Have a signal sent to a rank's processes."""
        self._tell(self._ranks.get(rank), {"signal": number})

    def loads(self) -> dict[int, Load]:
        """Return what ranks elsewhere are at, of those whose keepers have told it lately."""
        since = time.monotonic() - _OLD_S
        return {rank: load for rank, (told, load) in self._loads.items() if told > since}

    def forget_loads(self) -> None:
        """Know only what is told from now on."""
        self._loads.clear()

    def let_go(self) -> None:
        """Let what stood for the ranks end, and end what they have left."""
        for connection in list(self._ranks.values()):
            self._tell(connection, {"leave": True})

    def close(self) -> None:
        """Hear and say no more."""
        for each in (*self._listening, *(connection.socket for connection in self._connections.values())):
            each.close()
        self._listening, self._connections = [], {}

    def _listen(self, listening: socket.socket) -> None:
        listening.listen(_BACKLOG)
        listening.setblocking(False)
        self._listening.append(listening)

    def _accept(self, fd: int) -> None:
        for listening in self._listening:
            if listening.fileno() != fd:
                continue
            while True:  # A job of thousands of ranks knocks all at once.
                try:
                    accepted, _ = listening.accept()
                except OSError as error:
                    no_room = error.errno in (errno.EMFILE, errno.ENFILE)
                    if no_room and not self._drop_silent(time.monotonic()):
                        # Those for whom there is no room are their launcher's alone.
                        self._listening.remove(listening)
                        listening.close()
                    return  # Else nobody knocks any more.
                accepted.setblocking(False)
                self._connections[accepted.fileno()] = _Connection(accepted)

    def _drop_silent(self, since: float) -> bool:
        """Send away who has come by then and not said who it is; returns whether there was one."""
        silent = [each for each in self._connections.values() if each.rank is None and each.since <= since]
        for each in silent:
            self._drop(each)
        return bool(silent)

    def _read(self, connection: _Connection) -> list[Event]:
        try:
            data = connection.socket.recv(1 << 16)
            messages = connection.reader.feed(data)
        except BlockingIOError:
            return []
        except (OSError, ValueError):
            data, messages = b"", []
        events: list[Event] = []
        for message in messages:
            event = self._take(connection, message)
            if event is not None:
                events.append(event)
            if connection.is_closed:
                return events
        if not data:
            events += self._drop(connection)
        return events

    def _take(self, connection: _Connection, message: dict[str, object]) -> Event | None:
        if connection.rank is None:
            return self._welcome(connection, message)
        program = to_count(message.get("program"), _MAX_PID)
        if program and connection.socket.family == socket.AF_UNIX:
            self.programs[connection.rank] = program
        if load := _to_load(message.get("load")):
            self._loads[connection.rank] = time.monotonic(), load
        if message.get("ending") is True:
            return Ending(connection.rank)
        status = to_count(message.get("ended"), _MAX_STATUS)
        if status is None or connection.has_ended:
            return None
        connection.has_ended = True
        why = message.get("why")
        return Ended(connection.rank, status, why if isinstance(why, str) else "")

    def _welcome(self, connection: _Connection, message: dict[str, object]) -> Joined | Carried | None:
        rank = to_count(message.get("rank"), _MAX_RANKS if self._is_elastic else self._world_size)
        stream = message.get("stream")
        joins = stream is None
        if self._is_elastic and joins and rank in self._ranks:
            # Numbers change hands there: one that joins may begin with that of one that has another now.
            rank = max(self._ranks) + 1
        job = message.get("job")
        known = isinstance(job, str) and job.isascii() and hmac.compare_digest(job, self._job_id)
        if not known or rank is None or (rank in self._ranks) == joins:
            self._drop(connection)
            return None
        if not joins:
            return self._hand_over(connection, rank, stream)
        connection.rank = rank
        self._ranks[rank] = connection
        self._tell(connection, {"grace_s": self._grace_s})
        return Joined(rank)

    def _hand_over(self, connection: _Connection, rank: int, stream: object) -> Carried | None:
        """Give the connection to whoever reads output, if anybody does."""
        is_wanted = self._carries_output and stream in STREAMS and (rank, stream) not in self._carried
        if not is_wanted or not self._tell(connection, {"carries": True}):
            self._drop(connection)
            return None
        self._carried.add((rank, str(stream)))
        del self._connections[connection.socket.fileno()]
        connection.is_closed = True
        return Carried(rank, str(stream), connection.socket.detach())

    def _drop(self, connection: _Connection) -> Sequence[Lost]:
        self._connections.pop(connection.socket.fileno(), None)
        connection.socket.close()
        connection.is_closed = True
        if connection.rank is None or self._ranks.pop(connection.rank, None) is None:
            return ()
        return () if connection.has_ended else (Lost(connection.rank),)

    def _tell(self, connection: _Connection | None, message: dict[str, object]) -> bool:
        if connection is None:
            return False
        try:
            # A few bytes a message: a peer whose buffer is full of them has not read for very long.
            connection.socket.send(encode(message))
        except OSError:
            return False  # Its end is read next.
        return True


def _to_load(value: object) -> Load | None:
    """Accept what a keeper tells: ``[is_stopped, cpu_s, at_s]``; a message is data from outside."""
    match value:
        case [bool() as is_stopped, float() as cpu_s, float() as at_s] if isfinite(cpu_s) and isfinite(at_s):
            return Load(is_stopped, cpu_s, at_s)
    return None


def _address_towards(host: str) -> str | None:
    """Our address on the way to a host, without a word to it."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return None
