"""Trains small models with and without LMS in one process, and prints what it saw as JSON.

Run as a child process, because the memory limit is set before TensorFlow starts. Arguments: ``keras3`` or
``tf_keras``.
"""

import gc
import json
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["TF_CPU_ALLOCATOR_USE_BFC"] = "true"
os.environ["TF_CPU_BFC_MEM_LIMIT_IN_MB"] = "600"
os.environ["TF_USE_LEGACY_KERAS"] = "1" if sys.argv[1] == "tf_keras" else "0"

import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402
from tensorflow.python.eager import context  # noqa: E402

import lms  # noqa: E402

STEPS, BATCH = 20, 16


def custom_loop() -> list[Any]:
    """A loop of one's own with an open batch dimension and the forward pass in a nested function."""
    weights = [tf.Variable(tf.random.stateless_normal((128, 128), (seed, 1)) * 0.1) for seed in range(12)]

    @tf.function
    def forward(x: Any) -> Any:
        for weight in weights:
            x = tf.tanh(x @ weight)
        return tf.reduce_sum(x * x)

    @tf.function(input_signature=[tf.TensorSpec((None, 128))])
    def train(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = forward(x)
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(1e-4 * gradient)
        return loss

    for step in range(STEPS):
        train(tf.random.stateless_uniform((512 if step == STEPS - 1 else 1024, 128), (step, 2)))
    return weights


def fit() -> list[Any]:
    """Keras on arrays: the batch size is known to Keras alone, and the last batch is smaller."""
    tf.keras.utils.set_random_seed(1)
    layers = tf.keras.layers
    inputs = x = layers.Input((24, 24, 3))
    x = layers.Conv2D(16, 3, padding="same")(x)
    for _ in range(4):
        y = layers.Conv2D(16, 3, padding="same")(x)
        y = layers.ReLU()(layers.BatchNormalization()(y))
        x = layers.Add()([x, layers.Dropout(0.1, seed=3)(y)])
    model = tf.keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling2D()(x)))
    random = np.random.RandomState(0)
    count = BATCH * STEPS - 5
    images, labels = random.rand(count, 24, 24, 3).astype("f"), random.randint(0, 10, count)
    model.compile("adam", tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit(images, labels, batch_size=BATCH, epochs=1, verbose=0, shuffle=False)
    return [tf.convert_to_tensor(weight) for weight in model.get_weights()]


def measured(train: Callable[[], list[Any]]) -> tuple[str, int]:
    """The weights after training as a text, and the peak above what was in use before."""
    tf.keras.backend.clear_session()
    gc.collect()
    tf.config.experimental.reset_memory_stats("CPU:0")
    before = tf.config.experimental.get_memory_info("CPU:0")["current"]
    weights = b"".join(np.asarray(weight).tobytes() for weight in train())
    return weights.hex(), tf.config.experimental.get_memory_info("CPU:0")["peak"] - before


def swaps_after_grappler(train: Callable[[], list[Any]]) -> int:
    """Swap ops in the largest graph that is left when Grappler has optimised it."""
    context.enable_graph_collection()
    try:
        train()
        metadata = context.export_run_metadata()
    finally:
        context.disable_graph_collection()
    return max(
        sum(node.op in ("LmsSwapOut", "LmsSwapIn") for node in graphs.post_optimization_graph.node)
        for graphs in metadata.function_graphs
    )


def main() -> dict[str, Any]:
    """Train everything without LMS, then with each policy."""
    trainers = {"fit": fit} if sys.argv[1] == "tf_keras" else {"custom": custom_loop, "fit": fit}
    tf.config.optimizer.set_experimental_options({"arithmetic_optimization": False})
    seen: dict[str, Any] = {"off": {name: measured(train) for name, train in trainers.items()}}
    for policy, fields in (("all", {}), ("budget", {"budget_bytes": 3 << 20, "margin": 0.0})):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            lms.enable(policy=policy, **fields)
        seen[policy] = {name: measured(train) for name, train in trainers.items()}
        report = lms.report()
        seen[f"{policy}_report"] = {
            "graphs": [
                (one.name, one.edited, one.tensors, one.swap_ins, one.added_ops, one.why)
                for one in report.edited
            ],
            "peaks": [
                (one.peak_before_bytes - one.base_bytes, one.planned_peak_bytes - one.base_bytes)
                for one in report.edited
            ],
            "bytes_out": [one.bytes_out for one in report.edited],
            "transport": report.transport,
            "text": str(report),
        }
        if policy == "all" and "custom" in trainers:
            seen["grappler"] = swaps_after_grappler(custom_loop)
            if len(sys.argv) > 2:
                lms.plot(sys.argv[2])
        lms.disable()
    return seen


if __name__ == "__main__":
    print(json.dumps(main()))
