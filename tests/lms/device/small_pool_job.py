"""A small buffer is allocated behind a large one that then goes; prints as JSON whether a larger one fits.

    python small_pool_job.py eager|session|batches BYTES...

The room for small buffers is asked for with each of these sizes in turn; or once, for batches of these sizes.
"""

import json
import os
import sys
from collections.abc import Sequence
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import tensorflow as tf  # noqa: E402
from tensorflow.python.eager import context  # noqa: E402

from lms.device.memory_pool import Rooms  # noqa: E402

MIB = 1 << 20


def in_use() -> int:
    """Bytes that the device's allocator has handed out."""
    return int(tf.config.experimental.get_memory_info("CPU:0")["current"])


def main(where: str, sizes: Sequence[int]) -> dict[str, Any]:
    """Of 64 MiB the small one leaves 25 and 34, unless it has room of its own."""
    if where == "session":
        tf.compat.v1.disable_eager_execution()  # but where it is asked for; the allocator is the same
    with context.eager_mode():
        tf.zeros((60 * MIB // 4,))  # so that all of it is one region
    rooms, before = Rooms(), in_use()
    if where == "batches":
        rooms.make_for_batches(sizes, "CPU:0")
    else:
        for pool_bytes in sizes:
            rooms.make_small(pool_bytes, "CPU:0")
    with context.eager_mode():
        return {"kept_bytes": in_use() - before, "fits": fits()}


def fits() -> bool:
    """Whether 40 MiB are in one piece, behind a small buffer."""
    large = tf.fill((25 * MIB // 4,), 1.0)
    small = tf.fill((3 * MIB // 4,), 1.0)
    del large
    try:
        larger = tf.fill((40 * MIB // 4,), 1.0)
    except tf.errors.ResourceExhaustedError:
        return False
    return bool(larger[0] == small[0])


print(json.dumps(main(sys.argv[1], [int(size) for size in sys.argv[2:]])))
