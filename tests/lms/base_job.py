"""What lies on the device before a step, as planned and as counted; prints JSON.

python base_job.py shared|trained
"""

import json
import os
import sys
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["TF_CPU_ALLOCATOR_USE_BFC"] = "true"

import tensorflow as tf  # noqa: E402

import lms  # noqa: E402
from lms.own_memory import give_own_memory  # noqa: E402

KIB = 1 << 10
SIZE, LAYERS = 256, 10


def in_use() -> int:
    """Bytes that the device's allocator has handed out."""
    return int(tf.config.experimental.get_memory_info("CPU:0")["current"])


def shared() -> dict[str, Any]:
    """Four variables of 64 KiB begin as one tensor; two of them are changed."""
    start = tf.random.stateless_normal((128, 128), (1, 2))
    changed, frozen = ([tf.Variable(start) for _ in range(2)] for _ in range(2))

    @tf.function
    def step() -> Any:
        for variable in changed:
            variable.assign_add(tf.reduce_sum(frozen) * tf.ones_like(variable))

    traced, before = step.get_concrete_function(), in_use()
    found = {"copied": give_own_memory(traced.graph) // KIB, "grown": (in_use() - before) // KIB}
    found["again"] = give_own_memory(traced.graph) // KIB
    found["same"] = all(bool(tf.reduce_all(one == start)) for one in (*changed, *frozen))
    return found


def trained() -> dict[str, Any]:
    """A step with an optimizer whose momenta begin as one zero, and a loss with zeros for every output."""
    lms.enable(policy="all")
    layers = [tf.keras.layers.Dense(SIZE, activation="tanh") for _ in range(LAYERS)]
    model = tf.keras.Sequential([tf.keras.Input((SIZE,), batch_size=1024), *layers])
    optimizer = tf.keras.optimizers.Adam(1e-4)
    batch = tf.random.stateless_normal((1024, SIZE), (3, 4))
    labels = tf.cast(batch > 0, tf.float32)

    @tf.function
    def step() -> Any:
        with tf.GradientTape() as tape:
            logits = model(batch)
            losses = tf.nn.sigmoid_cross_entropy_with_logits(labels, logits)
            loss = tf.reduce_mean(losses)
        weights = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return loss

    for _ in range(2):
        step()
    graph = lms.report().edited[-1]
    return {"planned": graph.base_bytes, "counted": in_use()}


print(json.dumps({"shared": shared, "trained": trained}[sys.argv[1]]()))
