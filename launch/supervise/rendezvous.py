"""Where the ranks of one host meet: Horovod's own rendezvous server on loopback, and how ranks find it.

The port is listening before the first rank starts, but Horovod is imported only when a rank first knocks:
programs without Horovod never pay for it, and the others find it loaded while they are still importing
TensorFlow.
"""

import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from launch.model.plan import LaunchPlan, RankPlan

LOOPBACK = "127.0.0.1"
_BACKLOG = 1024
_ALL_RANKS = "global"
"""Horovod's scope in which every rank of a job meets every other."""


@dataclass(frozen=True)
class Slot:
    """One rank as Horovod's server and its workers know it (``horovod.runner.common.util.hosts``)."""

    hostname: str
    rank: int
    local_rank: int
    cross_rank: int
    size: int
    local_size: int
    cross_size: int


def number_slots(ranks: Sequence[RankPlan]) -> tuple[Slot, ...]:
    """Assign a job's ranks Horovod's numbers: the cross rank counts hosts that have this local rank."""
    local_size: dict[str, int] = {}
    for rank in ranks:
        local_size[rank.host] = local_size.get(rank.host, 0) + 1
    hosts = list(local_size)
    slots = []
    for rank in ranks:
        peers = [host for host in hosts if local_size[host] > rank.local_rank]
        slots.append(
            Slot(
                hostname=rank.host,
                rank=rank.rank,
                local_rank=rank.local_rank,
                cross_rank=peers.index(rank.host),
                size=len(ranks),
                local_size=local_size[rank.host],
                cross_size=len(peers),
            )
        )
    return tuple(slots)


def slot_env(slot: Slot, port: int, master_port: int) -> dict[str, str]:
    """Build the variables of one rank: Horovod's Gloo contract, and those that other frameworks read."""
    return {
        **gloo_env(slot, port),
        "RANK": str(slot.rank),
        "LOCAL_RANK": str(slot.local_rank),
        "WORLD_SIZE": str(slot.size),
        "LOCAL_WORLD_SIZE": str(slot.local_size),
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(master_port),
    }


def gloo_env(slot: Slot, port: int) -> dict[str, str]:
    """Horovod's Gloo contract: who a rank is, and where it finds the others."""
    return {
        "HOROVOD_HOSTNAME": slot.hostname,
        "HOROVOD_RANK": str(slot.rank),
        "HOROVOD_SIZE": str(slot.size),
        "HOROVOD_LOCAL_RANK": str(slot.local_rank),
        "HOROVOD_LOCAL_SIZE": str(slot.local_size),
        "HOROVOD_CROSS_RANK": str(slot.cross_rank),
        "HOROVOD_CROSS_SIZE": str(slot.cross_size),
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": LOOPBACK,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_IFACE": "lo",
    }


def free_port() -> int:
    """Find a port of loopback that nothing listens on at the moment, for MASTER_PORT."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


class Rendezvous:
    """A listening socket that becomes Horovod's rendezvous server at the first connection."""

    def __init__(self, plan: LaunchPlan, warn: Callable[[str], None], wake: Callable[[], None]) -> None:
        """Listen.

        Args:
            plan: The job.
            warn: Says a line; called from the server's thread.
            wake: Called from there too, when a rank has ``arrived``.
        """
        self.slots = number_slots(plan.ranks)
        self._warn, self._wake = warn, wake
        self._socket = socket.socket()
        self._socket.bind((LOOPBACK, 0))
        self._socket.listen(_BACKLOG)
        self.port: int = self._socket.getsockname()[1]
        self.arrived: set[int] = set()
        """Ranks that have come to meet the others, ever."""
        self._server: Any = None
        self._thread: threading.Thread | None = None

    def fileno(self) -> int:
        """Return the descriptor to watch for the first connection; -1 once that has come."""
        return -1 if self._thread is not None else self._socket.fileno()

    def serve(self) -> None:
        """Start Horovod's server on the socket, in a thread: the first connection is waiting."""
        self._thread = threading.Thread(target=self._serve, name="rendezvous", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop serving and free the port; any number of times."""
        if self._server is not None:
            self._server.shutdown()
            self._server = None
        self._socket.close()

    def _serve(self) -> None:
        try:
            server = _horovod_server(self._socket, self._arrive)
        except Exception as error:  # noqa: BLE001 - whatever it is, ranks must not hang on it
            self._socket.close()
            self._warn(
                f"a rank called hvd.init(), but this Python cannot serve Horovod's rendezvous ({error}); "
                "needed horovod where lmsrun is installed"
            )
            return
        server.init(self.slots)
        self._server = server
        server.serve_forever(poll_interval=0.1)

    def _arrive(self, rank: int) -> None:
        if rank not in self.arrived:
            self.arrived.add(rank)
            self._wake()


def _horovod_server(listening: socket.socket, arrive: Callable[[int], None]) -> Any:
    """Horovod's HTTP server on our socket: without password (CVE-2024-10190), it would bind 0.0.0.0."""
    from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

    class Handler(RendezvousHandler):  # type: ignore[misc]
        def _put_value(self, scope: str, key: str, value: bytes) -> None:
            """Keep what a rank tells the others; in this scope its key is its number."""
            super()._put_value(scope, key, value)
            if scope == _ALL_RANKS and key.isascii() and key.isdigit() and len(key) < 9:
                arrive(int(key))

        def do_HEAD(self) -> None:  # noqa: N802 - http.server's name
            """Refuse: the inherited answer would describe files of the current directory."""
            self.send_status_code(405)

    class Server(RendezvousHTTPServer):  # type: ignore[misc]
        daemon_threads = True

        def server_bind(self) -> None:
            """Take the socket that listens already; http.server's own would also look up a host name."""
            self.socket.close()
            self.socket: socket.socket = listening
            self.server_address = listening.getsockname()
            self.server_name, self.server_port = LOOPBACK, self.server_address[1]

        def server_activate(self) -> None:
            """Nothing to do: it listens."""

    return Server((LOOPBACK, 0), Handler, 0)
