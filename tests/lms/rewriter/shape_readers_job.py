"""Trains with a concatenation whose first operand is made long before the second; prints JSON.

python shape_readers_job.py off|all

The batch's size is open, so one op tells the shapes of both operands. Between them comes what takes most of
the memory.
"""

import json
import os
import sys
from hashlib import sha256

os.environ["TF_CPU_ALLOCATOR_USE_BFC"] = "true"
import tensorflow as tf

import lms

ROWS, NARROW, WIDE = 512, 32, 8192


def matrix(seed: int, *shape: int) -> tf.Variable:
    """Return a variable of small random numbers."""
    return tf.Variable(0.02 * tf.random.stateless_normal(shape, (1, seed)))


def main(policy: str) -> None:
    """Train for some steps."""
    if policy != "off":
        lms.enable(policy=policy)
    weights = [matrix(1, NARROW, WIDE), matrix(2, WIDE, NARROW)]
    fixed = matrix(3, NARROW, 2 * WIDE)

    @tf.function(input_signature=[tf.TensorSpec((None, NARROW))])
    def step(rows: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            early = tf.tanh(rows @ weights[0])
            late = tf.tanh(early @ weights[1])
            scale = tf.reduce_mean(tf.cumsum(late @ fixed, 1), 1, keepdims=True)
            late *= tf.stop_gradient(scale)
            loss = tf.reduce_sum(tf.concat([early, late], 1) ** 2)
        for weight, slope in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(1e-4 * slope)

    rows = tf.random.stateless_normal((ROWS, NARROW), (2, 2))
    for _ in range(3):
        step(rows)
    found = {"bits": sha256(b"".join(one.numpy().tobytes() for one in weights)).hexdigest()}
    if policy != "off":
        (graph,) = lms.report().graphs
        found |= {"tensors": graph.tensors, "planned": (graph.planned_peak_bytes or 0) - graph.base_bytes}
        found["measured"] = tf.config.experimental.get_memory_info("CPU:0")["peak"] - graph.base_bytes
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
