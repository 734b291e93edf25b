"""Swapping from a GPU: TensorFlow's copies through pinned host memory, each way on its own stream."""

from typing import Any

import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2
from tensorflow.python.framework import op_def_registry

from lms.transports.base import HOST_DEVICE, StoreStats
from lms.transports.copy_op import add_copy

TO_HOST, TO_DEVICE = "_CopyFromGpuToHost", "_CopyFromHostToGpu"


class DeviceTransport:
    """Copies between a GPU and pinned host memory.

    Where TensorFlow registers the asynchronous copy ops (2.21 does) they are used; elsewhere an ``Identity``
    placed on the host makes TensorFlow insert its own copies. Grappler would remove such an ``Identity``, so
    it is protected.
    """

    name = "device"
    note: str | None = None

    def __init__(self) -> None:
        self._asynchronous = has_copy_ops()

    def require_room(self, nbytes: int) -> None:
        """TensorFlow's own pool of pinned memory (``TF_GPU_HOST_MEM_LIMIT_IN_MB``) is the limit."""

    def swap_out(self, tensor: Any, readers: int, name: str) -> Any:
        """See :class:`lms.transports.base.Transport`."""
        if self._asynchronous:
            return protect(add_copy(TO_HOST, tensor, tensor.device, name))
        with tf.device(HOST_DEVICE):
            return protect(tf.raw_ops.Identity(input=tensor, name=name))

    def swap_in(self, held: Any, like: Any, device: str, name: str) -> Any:
        """See :class:`lms.transports.base.Transport`."""
        if self._asynchronous:
            back = protect(add_copy(TO_DEVICE, held, device, name))
        else:
            with tf.device(device or None):
                back = protect(tf.raw_ops.Identity(input=held, name=name))
        back.set_shape(like.shape)
        return back

    def stats(self) -> StoreStats:
        """TensorFlow does not count these copies; the plan's figures are the ones to read."""
        return StoreStats()


def has_copy_ops() -> bool:
    """Whether this TensorFlow registers both asynchronous copy ops with a GPU kernel."""
    from tensorflow.python.framework import kernels

    return all(
        op_def_registry.get(op) is not None
        and any(kernel.device_type == "GPU" for kernel in kernels.get_registered_kernels_for_op(op).kernel)
        for op in (TO_HOST, TO_DEVICE)
    )


def protect(tensor: Any) -> Any:
    """Keep Grappler from removing the op that makes ``tensor``."""
    tensor.op._set_attr("_grappler_do_not_remove", attr_value_pb2.AttrValue(b=True))
    return tensor
