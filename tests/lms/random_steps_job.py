"""Trains random graphs with and without LMS; prints as JSON by seed how far the results are apart.

Results are read several times, shapes between ops that TensorFlow merges, and what is merged waits for each
other: where a hand-made model has a layer, these have a knot.
"""

import json
import os
import random
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

import lms  # noqa: E402

ROWS, WIDTH, LATEST = 24, 32, 6
Weights = Sequence[Any]
Make = Callable[[Weights, Any, Any, Any], Any]


def layer(weights: Weights, x: Any) -> Any:
    """What becomes one kernel."""
    return tf.nn.bias_add(tf.matmul(x, weights[0]), weights[1])


def noisy(weights: Weights, x: Any) -> Any:
    """A shape that is read between two ops that become one."""
    made = layer(weights, x)
    noise = tf.random.stateless_uniform(tf.raw_ops.Shape(input=made), seed=[1, 2])
    return tf.nn.relu(made) * tf.matmul(noise, weights[0])


def scaled_swish(x: Any) -> Any:
    """A factor that another op reads too."""
    scaled = 1.5 * x
    return tf.stop_gradient(x * tf.sigmoid(scaled) + tf.tanh(scaled))


MAKES: tuple[Make, ...] = (
    lambda w, a, b, c: layer(w, a),
    lambda w, a, b, c: tf.nn.relu(layer(w, a)),
    lambda w, a, b, c: noisy(w, a),
    lambda w, a, b, c: scaled_swish(a),
    lambda w, a, b, c: a * tf.sigmoid(a),
    lambda w, a, b, c: tf.sin(-a),
    lambda w, a, b, c: tf.tanh(a) * b,
    lambda w, a, b, c: a + b,
    lambda w, a, b, c: (a + tf.exp(-tf.abs(b))) + (a + tf.tanh(c)),
    lambda w, a, b, c: tf.add_n([a, b, tf.matmul(c, w[0])]),
    lambda w, a, b, c: tf.split(tf.concat([a, b, a], 0), 3)[1] - c,
    lambda w, a, b, c: tf.concat([a, b], -1)[..., ::2],
    lambda w, a, b, c: tf.transpose(tf.tanh(tf.transpose(a))),
    lambda w, a, b, c: tf.pad(a, [[0, 0], [2, 2]])[:, 2:-2] * 0.5,
    lambda w, a, b, c: tf.nn.softmax(a) + b,
)


def loss_of(seed: int, weights: Weights, x: Any) -> Any:
    """A random graph of some thirty of these."""
    choice, made = random.Random(seed), [x]  # noqa: S311
    for _ in range(choice.randint(15, 40)):
        read = [choice.choice(made[-LATEST:]) for _ in range(3)]
        made.append(choice.choice(MAKES)(weights, *read) * 0.7)
    ends = [*made[-4:], layer(weights, made[-1])]
    return tf.add_n([tf.reduce_mean(one**2) for one in ends])


def train(seed: int) -> Any:
    """All weights after two steps from the same start."""
    numbers = np.random.default_rng(0)
    weights = [
        tf.Variable(numbers.normal(size=size).astype("f") * 0.1) for size in [(WIDTH, WIDTH), (WIDTH,)]
    ]

    @tf.function(input_signature=[tf.TensorSpec([None if seed % 2 else ROWS, WIDTH])])  # type: ignore[untyped-decorator]
    def step(x: Any) -> None:
        with tf.GradientTape() as tape:
            loss = loss_of(seed, weights, x)
        for weight, slope in zip(weights, tape.gradient(loss, weights), strict=True):
            if slope is not None:
                weight.assign_sub(0.05 * tf.clip_by_norm(slope, 1.0))

    for _ in range(2):
        step(tf.constant(numbers.normal(size=(ROWS, WIDTH)).astype("f")))
    return np.concatenate([weight.numpy().ravel() for weight in weights])


def main(seeds: Sequence[int]) -> dict[int, tuple[float, int]]:
    """By seed the largest distance between the weights, and how many tensors were swapped."""
    warnings.simplefilter("ignore")
    seen = {}
    for seed in seeds:
        off = train(seed)
        lms.enable(policy="all", min_tensor_bytes=256)
        on = train(seed)
        seen[seed] = float(np.abs(on - off).max()), sum(graph.tensors for graph in lms.report().graphs)
        lms.disable()
    return seen


print(json.dumps(main(range(int(sys.argv[1])))))
