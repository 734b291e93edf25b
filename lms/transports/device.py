"""Swapping from a GPU: TensorFlow's copies through pinned host memory, each way on a stream of its own."""

from collections.abc import Mapping
from typing import Any

from tensorflow.core.framework import attr_value_pb2
from tensorflow.python.framework import op_def_registry

from lms.errors import PlaceError, StoreError
from lms.transports.base import StoreStats
from lms.transports.copy_op import add_copy

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

    def __init__(self, environ: Mapping[str, str]) -> None:
        missing = [op for op in (TO_HOST, TO_DEVICE) if op_def_registry.get(op) is None]
        if missing:
            raise PlaceError(
                f"this TensorFlow has no {missing[0]}, which swaps from a GPU; needed 2.15 to 2.21"
            )
        text = environ.get(POOL, "").strip()
        self._pool_mb = int(text) if text.isdigit() else POOL_MB

    def require_room(self, nbytes: int) -> None:
        """See :class:`lms.transports.base.Transport`; the room is TensorFlow's pool of pinned memory."""
        if nbytes > self._pool_mb << 20:
            raise StoreError(
                f"one step swaps {nbytes >> 20} MiB and TensorFlow's pool of pinned host memory holds "
                f"{self._pool_mb}; raise {POOL} (MiB) as far as the host has memory, or use less batch"
            )

    def swap_out(self, tensor: Any, readers: int, name: str) -> Any:
        """See :class:`lms.transports.base.Transport`."""
        return protect(add_copy(TO_HOST, tensor, _gpu(tensor.device), name))

    def swap_in(self, held: Any, like: Any, device: str, name: str) -> Any:
        """See :class:`lms.transports.base.Transport`."""
        back = protect(add_copy(TO_DEVICE, held, _gpu(device), name))
        back.set_shape(like.shape)
        return back

    def stats(self) -> StoreStats:
        """TensorFlow does not count these copies; the plan's figures are the ones to read."""
        return StoreStats()


def _gpu(device: str) -> str:
    """Where a copy runs: both ways on the GPU, so beside an op on the host TensorFlow chooses it."""
    return "" if "CPU" in device.upper() else device


def protect(tensor: Any) -> Any:
    """Keep Grappler from removing the op that makes ``tensor``."""
    tensor.op._set_attr("_grappler_do_not_remove", attr_value_pb2.AttrValue(b=True))
    return tensor
