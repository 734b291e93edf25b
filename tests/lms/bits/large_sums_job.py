"""Trains a step that TensorFlow takes to be too large for the CPU; prints what became of it, as JSON."""

import hashlib
import json
import os
import warnings

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import tensorflow as tf  # noqa: E402
from tensorflow.python.eager import context  # noqa: E402

import lms  # noqa: E402

ROWS, WIDTH, TERMS = 2048, 1024, 16
"""Sixteen terms of 8 MiB, and what they are made from: TensorFlow reckons with 256 MiB, whatever there is."""


def train() -> tuple[int, str]:
    """How many sums add their terms as these arrive, and the weights after two steps."""
    weights = [tf.Variable(tf.random.stateless_normal((WIDTH,), (2, seed))) for seed in range(TERMS)]

    @tf.function
    def step() -> tf.Tensor:
        with tf.GradientTape() as tape:
            x = tf.random.stateless_normal((ROWS, WIDTH), (1, 1)) * weights[0]
            loss = tf.reduce_sum(tf.add_n([tf.sin(x * weight) for weight in weights]) ** 2)
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(1e-6 * gradient)
        return loss

    context.enable_graph_collection()
    step()
    graphs = context.export_run_metadata().function_graphs
    context.disable_graph_collection()
    step()
    made = [node.op for graph in graphs for node in graph.post_optimization_graph.node]
    trained = b"".join(weight.numpy().tobytes() for weight in weights)
    return made.count("TemporaryVariable"), hashlib.sha256(trained).hexdigest()


def main() -> dict[str, tuple[int, str, int]]:
    """The same without LMS and by policy, each with how many tensors were swapped."""
    warnings.simplefilter("ignore")
    seen = {"without": (*train(), 0)}
    for policy in ("auto", "all"):
        lms.enable(policy=policy)
        seen[policy] = (*train(), sum(graph.tensors for graph in lms.report().graphs))
        lms.disable()
    return seen


print(json.dumps(main()))
