"""The interface of a transport."""

from dataclasses import dataclass
from typing import Any, Protocol

HOST_DEVICE = "/device:CPU:0"
"""Without job and task: in a cluster the job has a name of its own."""


@dataclass(frozen=True)
class StoreStats:
    """The figures of what the transport has moved and holds, in this process so far."""

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


class CopyWriter(Protocol):
    """Writes copies into a graph. Both calls fill in a node that has no inputs yet."""

    def write_swap_out(self, node: Any, tensor: str, dtype: int, device: str) -> None:
        """Make ``node`` (a NodeDef) copy ``tensor``, which is made on ``device``, off it."""

    def write_swap_in(self, node: Any, held: str, dtype: int, device: str) -> None:
        """Make ``node`` copy what a swap-out holds back to ``device``."""


class Transport(CopyWriter, Protocol):
    """One way to move tensors off the device and back."""

    @property
    def name(self) -> str:
        """``device``, ``host``, ``file`` or ``numpy``."""

    @property
    def note(self) -> str | None:
        """One line for people when this is not the transport they would expect."""

    @property
    def counts(self) -> bool:
        """Whether :meth:`stats` counts what really ran."""

    @property
    def in_regions(self) -> bool:
        """Whether the room is taken in regions that are never joined (:mod:`lms.simulate.host_pool`)."""

    def room_bytes(self) -> int | None:
        """Return the bytes that can be held at once; ``None`` where no limit is known."""

    def require_room(self, nbytes: int) -> None:
        """Check that ``nbytes`` can be held at once.

        Raises:
            StoreError: If they cannot; the text says what to try.
        """

    def stats(self) -> StoreStats:
        """Return the figures of what has been moved so far."""


def write_copy(node: Any, op_type: str, tensor: str, dtype: int, device: str) -> None:
    """Make ``node`` an op with one input and one output, both of type ``T``."""
    node.op, node.device = op_type, device
    node.input.append(tensor)
    node.attr["T"].type = dtype


def host_beside(device: str) -> str:
    """Return the host device of the machine that a device belongs to."""
    job, _, _ = device.partition("/device:")
    return f"{job}{HOST_DEVICE}"
