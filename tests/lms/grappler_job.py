"""Trains with LMS where an update waits for zeros that nobody reads; prints what stays in memory, as JSON."""

import json
import os

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["TF_CPU_ALLOCATOR_USE_BFC"] = "true"

import tensorflow as tf  # noqa: E402

import lms  # noqa: E402

SIZE, LAYERS = 512, 4


def in_use() -> int:
    """Bytes on the device now."""
    return int(tf.config.experimental.get_memory_info("CPU:0")["current"])


def main() -> dict[str, int]:
    """Bytes of one such tensor, and how many more are in use after two steps than before the first."""
    lms.enable(policy="all")
    weights = [tf.Variable(tf.random.stateless_normal((SIZE, SIZE), (1, seed))) for seed in range(LAYERS)]
    images = tf.random.stateless_normal((256, SIZE), (2, 2))

    @tf.function
    def train() -> tf.Tensor:
        with tf.GradientTape() as tape:
            x = images
            for weight in weights:
                x = tf.tanh(x @ weight)
            loss = tf.reduce_sum(x * x)
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            with tf.control_dependencies([tf.zeros_like(weight)]):
                weight.assign_sub(1e-4 * gradient)
        return loss

    before = in_use()
    train()
    train()
    swapped = lms.report().graphs[-1].tensors
    return {"tensor": SIZE * SIZE * 4, "more": in_use() - before, "swapped": swapped}


print(json.dumps(main()))
