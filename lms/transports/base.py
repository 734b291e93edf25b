"""What the rewriter asks of a transport."""

from dataclasses import dataclass
from typing import Any, Protocol

HOST_DEVICE = "/device:CPU:0"
"""Without job and task: in a cluster the job has a name of its own."""


@dataclass(frozen=True)
class StoreStats:
    """What the transport has moved and holds, in this process so far."""

    bytes_in_use: int = 0
    peak_bytes: int = 0
    memory_bytes: int = 0
    """Host memory the store has taken from the system."""
    file_bytes: int = 0
    """Disk space the store has taken."""
    swap_outs: int = 0
    swap_ins: int = 0
    bytes_out: int = 0
    bytes_in: int = 0
    seconds_out: float = 0.0
    seconds_in: float = 0.0


class Transport(Protocol):
    """One way to move tensors off the device and back. Both calls add ops to the current default graph."""

    @property
    def name(self) -> str:
        """``device``, ``host``, ``file`` or ``numpy``."""

    @property
    def note(self) -> str | None:
        """One line for people when this is not the transport they would expect."""

    def require_room(self, nbytes: int) -> None:
        """Check that ``nbytes`` can be held at once.

        Raises:
            StoreError: If they cannot; the text says what to try.
        """

    def swap_out(self, tensor: Any, readers: int, name: str) -> Any:
        """Copy ``tensor`` off the device; the result is good for ``readers`` calls of ``swap_in``."""

    def swap_in(self, held: Any, like: Any, device: str, name: str) -> Any:
        """Copy back to ``device``; the result has the type and shape of ``like``."""

    def stats(self) -> StoreStats:
        """What has been moved so far."""
