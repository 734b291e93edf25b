"""Swapping on the CPU device without a compiler: NumPy arrays, slower and behind Python's lock."""

import weakref
from typing import Any

import numpy as np
from tensorflow.python.ops import script_ops

from lms.transports.base import StoreStats, host_beside

ALIGNMENT = 64
"""TensorFlow takes an array over as it is, without a copy into its own memory, where it begins at a multiple
of this."""


class NumpyTransport:
    """The fallback of :class:`lms.transports.host.HostTransport`; ``note`` says why it is used.

    What is held is a tensor on top of an array's memory, so TensorFlow itself frees it behind the last
    reader, also when there is none or the step has failed; at the latest when the next tensor moves.
    """

    name = "numpy"
    counts = True
    in_regions = False

    def __init__(self, note: str | None = None) -> None:
        self.note = note
        self._functions = {"_put": self._put, "_get": self._get}
        """TensorFlow's table of Python functions holds them weakly."""
        self._tokens = {
            name: script_ops._py_funcs.insert(function) for name, function in self._functions.items()
        }
        self._moved = {"outs": 0, "ins": 0, "bytes_out": 0, "bytes_in": 0, "in_use": 0, "peak": 0}

    def room_bytes(self) -> int | None:
        """Return ``None``: Python's heap has no limit of its own."""
        return None

    def require_room(self, nbytes: int) -> None:
        """Accept any size."""

    def write_swap_out(self, node: Any, tensor: str, dtype: int, device: str) -> None:
        """Make ``node`` call the Python function that copies a tensor into an array."""
        self._write(node, self._put, tensor, dtype, device)

    def write_swap_in(self, node: Any, held: str, dtype: int, device: str) -> None:
        """Make ``node`` call the Python function that copies an array back."""
        self._write(node, self._get, held, dtype, device)

    def _write(self, node: Any, function: Any, tensor: str, dtype: int, device: str) -> None:
        """Make ``node`` call a Python function, as ``tf.numpy_function`` does."""
        node.op, node.device = "PyFunc", host_beside(device)
        node.input.append(tensor)
        node.attr["token"].s = self._tokens[function.__name__].encode()
        for name in ("Tin", "Tout"):
            node.attr[name].list.type.append(dtype)

    def _put(self, value: Any) -> Any:
        held = aligned_copy(value)
        self._count("out", value.nbytes)
        self._moved["in_use"] += value.nbytes
        self._moved["peak"] = max(self._moved["peak"], self._moved["in_use"])
        weakref.finalize(held, self._freed, value.nbytes)
        return held

    def _get(self, value: Any) -> Any:
        self._count("in", value.nbytes)
        return np.array(value, copy=True)

    def stats(self) -> StoreStats:
        """Return the bytes moved and held so far."""
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
    """Return a copy that begins at a multiple of :data:`ALIGNMENT`."""
    memory = np.empty(value.nbytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    held: np.ndarray[Any, Any] = memory[start : start + value.nbytes].view(value.dtype).reshape(value.shape)
    held[...] = value
    return held
