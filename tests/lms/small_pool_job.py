"""A small buffer is allocated behind a large one that then goes; prints as JSON whether a larger one fits."""

import json
import os
import sys

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import tensorflow as tf  # noqa: E402

from lms.small_pool import SmallPool  # noqa: E402

MIB = 1 << 20


def main(pool_bytes: int) -> bool:
    """Of 64 MiB the small one leaves 25 and 34, unless it has room of its own."""
    tf.zeros((60 * MIB // 4,))  # so that all of it is one region
    pool = SmallPool()
    if pool_bytes:
        pool.make(pool_bytes, "CPU:0")
    large = tf.fill((25 * MIB // 4,), 1.0)
    small = tf.fill((3 * MIB // 4,), 1.0)
    del large
    try:
        larger = tf.fill((40 * MIB // 4,), 1.0)
    except tf.errors.ResourceExhaustedError:
        return False
    return bool(larger[0] == small[0])


print(json.dumps({"fits": main(int(sys.argv[1]))}))
