"""Room of their own for a step's small buffers, between which no large one has to find its place.

The statistics of a normalisation are a few hundred bytes and live from the forward pass to the backward.
TensorFlow's allocator gives each a piece of the smallest free chunk; in a step that is short of memory that
is soon a large one, which does not become whole again while they live. A free chunk that is just large enough
for all of them, and that something keeps apart from the rest, takes them instead.

What keeps it apart is a buffer of the same size, allocated right after it. If a smaller free chunk took the
first of the two, that chunk is the room, once the first is freed. If none was there, the second cannot have
found one either, and lies right behind the first.
"""

from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context

FLOAT_BYTES = 4


class SmallPool:
    """The free chunk for small buffers of this process's steps."""

    def __init__(self) -> None:
        self._guard: Any = None
        self._nbytes = 0

    def make(self, nbytes: int, device: str) -> None:
        """Have a free chunk of ``nbytes`` on ``device``, unless there is one or no room for it.

        What kept a smaller one apart goes then.
        """
        if nbytes <= self._nbytes or not tf.compat.v1.executing_eagerly_outside_functions():
            return
        with context.eager_mode(), tf.device(device):
            try:
                room, guard = (tf.zeros((nbytes // FLOAT_BYTES,)) for _ in range(2))
            except tf.errors.ResourceExhaustedError:
                return
            del room
        self._guard, self._nbytes = guard, nbytes
