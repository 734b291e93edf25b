"""Keep a free chunk for a step's small buffers, so that they do not fragment the room of large ones.

The statistics of a normalisation are a few hundred bytes and live from the forward pass to the backward.
TensorFlow's allocator gives each a piece of the smallest free chunk; in a step that is short of memory that
is soon a large one, which does not become whole again while they live. A free chunk that is just large enough
for all of them, and that something keeps apart from the rest, takes them instead.

What keeps it apart is a buffer of the same size, allocated right after it. If a smaller free chunk took the
first of the two, that chunk is the room, once the first is freed. If none was there, the second cannot have
found one either, and lies right behind the first.
"""

from collections.abc import Iterable
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context

from lms.ir.liveness import round_up
from lms.simulate.allocation_trace import SMALL_BYTES

FLOAT_BYTES = 4


class SmallPool:
    """The free chunk for small buffers of this process's steps, on each device."""

    def __init__(self) -> None:
        self._guards: dict[str, tuple[int, Any]] = {}

    def nbytes(self, device: str) -> int:
        """Return the bytes of a device's chunk for small buffers; 0 where there is none."""
        return self._guards.get(device, (0, None))[0]

    def make(self, nbytes: int, device: str, pending: Iterable[int] = ()) -> None:
        """Have a free chunk of ``nbytes`` on ``device``, unless there is one or no room for it.

        The buffer that kept a smaller chunk apart is freed then. A session's memory is of the same allocator.

        Args:
            nbytes: The size; 0 where no room is wanted.
            device: The device's name.
            pending: Bytes of each variable that is made only later: small ones will lie there for good.
        """
        if nbytes:
            nbytes += sum(round_up(size) for size in pending if size <= SMALL_BYTES)
        if nbytes <= self.nbytes(device):
            return
        with context.eager_mode(), tf.device(device):
            try:
                room, guard = (tf.zeros((nbytes // FLOAT_BYTES,)) for _ in range(2))
            except tf.errors.ResourceExhaustedError:
                return
            del room
        self._guards[device] = nbytes, guard
