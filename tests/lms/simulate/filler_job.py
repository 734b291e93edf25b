"""Asks the real allocator for what fillers take, beside the simulated one."""

import json
import os

import tensorflow as tf

from lms.device.memory_pool import PoolClaim
from lms.native.build import FILLER
from lms.native.library import load_library
from lms.simulate.bfc_arena import Arena

M = 1 << 20
GPU = bool(tf.config.list_physical_devices("GPU"))
DEVICE = "GPU:0" if GPU else "CPU:0"


def in_use() -> int:
    return int(tf.config.experimental.get_memory_info(DEVICE)["current"])


def empty(nbytes: int) -> tf.Tensor:
    return tf.raw_ops.Empty(shape=[nbytes // 4], dtype=tf.float32, init=False)


claim = PoolClaim(os.environ)
claim.install()
tf.constant(0.0)
assert GPU or claim.is_whole
region = 64 * M - (0 if GPU else 2 * M)  # the CPU's first region is one of its own
ops = load_library(FILLER, os.environ).ops
with tf.device(DEVICE):
    held = empty(8 * M)
    before = in_use()
    whole = empty(30 * M)
    without = in_use() - before
    del whole
    tf.config.experimental.reset_memory_stats(DEVICE)
    rest = ops.lms_filler(sizes=[30 * M], least=M)
    taken = in_use() - before
    peak = int(tf.config.experimental.get_memory_info(DEVICE)["peak"]) - before
    buffer = empty(30 * M)
    given = in_use() - before - taken
    arena = Arena(region)
    arena.allocate(8 * M)
    _, simulated = arena.take_rest([30 * M], M)
    del rest, buffer
    print(
        json.dumps(
            {
                "taken": taken,
                "simulated": simulated,
                "peak": peak,
                "simulated peak": arena.peak - 8 * M,
                "given": given,
                "given without": without,
                "nothing": int(tf.size(ops.lms_filler(sizes=[10 * M], least=M))),
                "too large": int(tf.size(ops.lms_filler(sizes=[200 * M], least=M))),
            }
        )
    )
