"""Read the counters of a device's allocator that TensorFlow's Python does not show."""

from collections.abc import Mapping
from dataclasses import dataclass

import tensorflow as tf
from tensorflow.python.eager import context

from lms.native.build import ALLOCATOR_STATS
from lms.native.library import load_library


@dataclass(frozen=True)
class AllocatorStats:
    """Counters of one allocator since the process began; None where this allocator does not count."""

    num_allocs: int | None
    largest_alloc_size: int | None
    bytes_limit: int | None
    pool_bytes: int | None
    """What it has taken from the device: in use, and idle in its pool."""
    peak_pool_bytes: int | None


def read_allocator(device: str, environ: Mapping[str, str]) -> AllocatorStats:
    """Ask the allocator of ``device`` (``GPU:0``) through the compiled op.

    Args:
        device: TensorFlow's short name of it.
        environ: Where the cache of compiled ops is looked up.

    Raises:
        BuildError: If the op cannot be compiled or loaded.
    """
    read = load_library(ALLOCATOR_STATS, environ).ops.lms_allocator_stats
    with context.eager_mode(), tf.device(device):
        figures = read().numpy().tolist()
    return AllocatorStats(*(None if figure < 0 else figure for figure in figures))
