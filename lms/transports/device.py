"""Swapping from a GPU: TensorFlow's copies through pinned host memory, each way on a stream of its own."""

from collections.abc import Mapping
from typing import Any

from tensorflow.python.framework import op_def_registry

from lms.errors import PlaceError, StoreError
from lms.transports.base import StoreStats, write_copy

TO_HOST, TO_DEVICE = "_CopyFromGpuToHost", "_CopyFromHostToGpu"
POOL, POOL_MB = "TF_GPU_HOST_MEM_LIMIT_IN_MB", 128 << 10
"""The variable for the largest size of the pool of pinned memory, and TensorFlow's own choice, in MiB."""


class DeviceTransport:
    """Copies between a GPU and pinned host memory by TensorFlow's own ops, which Grappler adds for that too.

    A copy out holds the tensor until the last byte has left, and waits for the kernels that were launched
    before it; so does a copy back, whose buffer one of them may still be using (``gpu_util.cc``).

    Args:
        environ: The process's variables.

    Raises:
        PlaceError: If this TensorFlow does not have the ops.
    """

    name = "device"
    note: str | None = None
    counts = False
    in_regions = True

    def __init__(self, environ: Mapping[str, str]) -> None:
        missing = [op for op in (TO_HOST, TO_DEVICE) if op_def_registry.get(op) is None]
        if missing:
            raise PlaceError(
                f"this TensorFlow has no {missing[0]}, which swaps from a GPU; needed 2.15 to 2.21"
            )
        text = environ.get(POOL, "").strip()
        self._pool_mb = int(text) if text.isdigit() else POOL_MB

    def room_bytes(self) -> int:
        """Return the size of TensorFlow's pool of pinned memory."""
        return self._pool_mb << 20

    def require_room(self, nbytes: int) -> None:
        """Check that TensorFlow's pool of pinned memory can hold ``nbytes``."""
        if nbytes > self.room_bytes():
            raise StoreError(
                f"one step swaps {nbytes >> 20} MiB and TensorFlow's pool of pinned host memory holds "
                f"{self._pool_mb}; raise {POOL} (MiB) as far as the host has memory, use less batch, "
                "or recompute='auto' where it is off"
            )

    def write_swap_out(self, node: Any, tensor: str, dtype: int, device: str) -> None:
        """Make ``node`` TensorFlow's copy from the GPU to pinned host memory."""
        write_copy(node, TO_HOST, tensor, dtype, device)

    def write_swap_in(self, node: Any, held: str, dtype: int, device: str) -> None:
        """Make ``node`` TensorFlow's copy from pinned host memory back to the GPU."""
        write_copy(node, TO_DEVICE, held, dtype, device)

    def stats(self) -> StoreStats:
        """Return zeros: TensorFlow does not count these copies; read the plan's figures instead."""
        return StoreStats()
