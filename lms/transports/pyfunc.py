"""Swapping on the CPU device without a compiler: NumPy arrays, slower and behind Python's lock."""

import weakref
from typing import Any

import numpy as np
import tensorflow as tf

from lms.transports.base import StoreStats

ALIGNMENT = 64
"""TensorFlow takes an array over as it is, without a copy into its own memory, where it begins at a multiple
of this."""


class NumpyTransport:
    """The fallback of :class:`lms.transports.host.HostTransport`; ``note`` says why it is used.

    What is held is a tensor on top of an array's memory, so TensorFlow itself frees it behind the last
    reader, also when there is none or the step has failed; at the latest when the next tensor moves.
    """

    name = "numpy"

    def __init__(self, note: str | None = None) -> None:
        self.note = note
        self._moved = {"outs": 0, "ins": 0, "bytes_out": 0, "bytes_in": 0, "in_use": 0, "peak": 0}

    def require_room(self, nbytes: int) -> None:
        """Python's heap has no limit of its own."""

    def swap_out(self, tensor: Any, readers: int, name: str) -> Any:
        """See :class:`lms.transports.base.Transport`."""

        def put(value: Any) -> Any:
            held = aligned_copy(value)
            self._count("out", value.nbytes)
            self._moved["in_use"] += value.nbytes
            self._moved["peak"] = max(self._moved["peak"], self._moved["in_use"])
            weakref.finalize(held, self._freed, value.nbytes)
            return held

        return tf.numpy_function(put, [tensor], tensor.dtype, name=name)

    def swap_in(self, held: Any, like: Any, device: str, name: str) -> Any:
        """See :class:`lms.transports.base.Transport`."""

        def get(value: Any) -> Any:
            self._count("in", value.nbytes)
            return np.array(value, copy=True)

        with tf.device(device or None):
            back = tf.numpy_function(get, [held], like.dtype, name=name)
        back.set_shape(like.shape)
        return back

    def stats(self) -> StoreStats:
        """See :class:`lms.transports.base.Transport`."""
        m = self._moved
        return StoreStats(
            m["in_use"], m["peak"], m["in_use"], 0, m["outs"], m["ins"], m["bytes_out"], m["bytes_in"]
        )

    def _count(self, way: str, nbytes: int) -> None:
        self._moved[f"{way}s"] += 1
        self._moved[f"bytes_{way}"] += nbytes

    def _freed(self, nbytes: int) -> None:
        self._moved["in_use"] -= nbytes


def aligned_copy(value: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """A copy that begins at a multiple of :data:`ALIGNMENT`."""
    memory = np.empty(value.nbytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    held: np.ndarray[Any, Any] = memory[start : start + value.nbytes].view(value.dtype).reshape(value.shape)
    held[...] = value
    return held
