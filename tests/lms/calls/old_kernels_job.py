"""Plan one step again and again; prints the MiB in use after each call as JSON.

python old_kernels_job.py grow|toggle|drawing|small
"""

import json
import os
import sys
from typing import Any

os.environ["TF_CPU_ALLOCATOR_USE_BFC"] = "true"

import numpy as np
import tensorflow as tf

import lms

WAY = sys.argv[1]
TABLE = np.full((256 if WAY == "small" else 2048, 512), 0.01, np.float32)
WIDTH = 256


def in_use() -> int:
    return round(tf.config.experimental.get_memory_info("CPU:0")["current"] / (1 << 20))


def make() -> Any:
    weights = tf.Variable(tf.ones((WIDTH, 512)) * 0.01)

    @tf.function(input_signature=[tf.TensorSpec((None, WIDTH), tf.float32)])
    def step(x: Any) -> Any:
        if WAY == "drawing":
            x += tf.random.uniform((WIDTH,), seed=1)
        with tf.GradientTape() as tape:
            y = tf.nn.relu(x @ weights) @ tf.transpose(tf.constant(TABLE))
            loss = tf.reduce_mean(y**2)
        (gradient,) = tape.gradient(loss, [weights])
        weights.assign_sub(0.1 * gradient)
        return loss

    return step


step, seen, losses = make(), [], []
if WAY != "toggle":
    lms.enable(policy="all", min_tensor_bytes=1)
for rows in [64] * 4 if WAY == "toggle" else [64, 128, 192, 256]:
    if WAY == "toggle":
        lms.enable(policy="all", min_tensor_bytes=1)
    losses.append(float(step(tf.ones((rows, WIDTH)))))
    seen.append(in_use())
    if WAY == "toggle":
        lms.disable()
plans = len(lms.report().graphs) if WAY != "toggle" else len(seen)
print(json.dumps({"in use": seen, "losses": losses, "plans": plans}))
