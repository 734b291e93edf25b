"""Swapping on the CPU device without a compiler: NumPy arrays, slower and behind Python's lock."""

import itertools
from typing import Any

import numpy as np
import tensorflow as tf

from lms.transports.base import StoreStats


class NumpyTransport:
    """The fallback of :class:`lms.transports.host.HostTransport`; ``note`` says why it is used."""

    name = "numpy"

    def __init__(self, note: str | None = None) -> None:
        self.note = note
        self._held: dict[int, tuple[np.ndarray[Any, Any], int]] = {}
        self._ids = itertools.count()
        self._moved = {"outs": 0, "ins": 0, "bytes_out": 0, "bytes_in": 0, "in_use": 0, "peak": 0}

    def require_room(self, nbytes: int) -> None:
        """Python's heap has no limit of its own."""

    def swap_out(self, tensor: Any, readers: int, name: str) -> Any:
        """See :class:`lms.transports.base.Transport`; the held value is the id of an array."""

        def put(value: Any) -> Any:
            held = next(self._ids)
            self._held[held] = (np.array(value, copy=True), readers)
            self._count("out", value.nbytes)
            return np.int64(held)

        return tf.numpy_function(put, [tensor], tf.int64, name=name)

    def swap_in(self, held: Any, like: Any, device: str, name: str) -> Any:
        """See :class:`lms.transports.base.Transport`."""

        def get(key: Any) -> Any:
            value, readers = self._held.pop(int(key))
            if readers > 1:
                self._held[int(key)] = (value, readers - 1)
            self._count("in", value.nbytes, last=readers == 1)
            return value

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

    def _count(self, way: str, nbytes: int, last: bool = True) -> None:
        self._moved[f"{way}s"] += 1
        self._moved[f"bytes_{way}"] += nbytes
        if way == "out":
            self._moved["in_use"] += nbytes
            self._moved["peak"] = max(self._moved["peak"], self._moved["in_use"])
        elif last:
            self._moved["in_use"] -= nbytes
