"""Fill the pool of a limited CPU device piece by piece, free it, and ask for most of it; prints JSON.

python pool_claim_job.py claimed|session|late|"late session" [MIB THAT ARE ASKED FOR]
"""

import json
import os
import sys
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import tensorflow as tf  # noqa: E402

from lms.device.memory_pool import PoolClaim  # noqa: E402
from lms.simulate.bfc_arena import Arena  # noqa: E402

MIB = 1 << 20
SIZES = (1, 3, 6, 12)
WANTED = int(sys.argv[2]) if sys.argv[2:] else 40


def fits(mib: int) -> bool:
    """Whether a buffer finds room."""
    try:
        tf.raw_ops.Empty(shape=[mib, MIB], dtype=tf.uint8, init=False)  # sizes have 32 bits
    except tf.errors.ResourceExhaustedError:
        return False
    return True


def foreseen(*, grows: bool) -> bool:
    """What the simulated allocator says of the same buffers."""
    arena = Arena(64 * MIB, grows=grows)
    for offset in [arena.allocate(mib * MIB) for mib in SIZES]:
        arena.release(offset or 0)
    return arena.allocate(WANTED * MIB) is not None


def main(when: str) -> dict[str, Any]:
    """Of 64 MiB regions of 2, 4, 8 and 16 leave 34."""
    claim = PoolClaim(os.environ)
    if when == "late":
        tf.constant(1)
    if when != "late session":
        claim.install()
    if "session" in when:
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            session.run(tf.random.uniform((256,)))
    claim.install()
    held = [tf.raw_ops.Empty(shape=[mib * MIB], dtype=tf.uint8, init=False) for mib in SIZES]
    del held
    return {
        "peak": tf.config.experimental.get_memory_info("CPU:0")["peak"],
        "whole": claim.is_whole,
        "still": PoolClaim(os.environ).is_whole,
        "grows": claim.leaves_growing("CPU"),
        "fits": fits(WANTED)
        if when != "late session"
        else False,  # TensorFlow waits 10 s for memory that never comes
        "foreseen": foreseen(grows=claim.leaves_growing("CPU")),
        "in_use": tf.config.experimental.get_memory_info("CPU:0")["current"],
    }


print(json.dumps(main(sys.argv[1])))
