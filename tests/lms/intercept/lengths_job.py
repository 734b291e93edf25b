"""Trains on sequences of open length without LMS and with it; prints what was planned as JSON."""

import json
import os
import sys
import warnings
from collections.abc import Iterator
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

import lms  # noqa: E402

WORDS, WIDTH, BATCH = 50, 32, 32
LENGTHS = (20, 10, 40, 30)


def sentences() -> Iterator[tuple[Any, Any]]:
    """Words, and the words to come; the labels are one shorter than what is read."""
    rng = np.random.default_rng(0)
    for length in LENGTHS:
        words = rng.integers(0, WORDS, (BATCH, length + 1)).astype("int32")
        yield words, words[:, 1:]


def data() -> Any:
    """Nobody knows a size of these batches before they come."""
    spec = tf.TensorSpec((None, None), tf.int32)
    return tf.data.Dataset.from_generator(sentences, output_signature=(spec, spec))


def by_keras() -> list[Any]:
    """Two epochs of ``fit``; the losses, how often the step was traced, and the weights."""
    keras, layers = tf.keras, tf.keras.layers
    keras.utils.set_random_seed(2)
    x = inputs = layers.Input((None, WORDS))
    for _ in range(5):
        x = layers.Dense(WIDTH, activation="relu")(x)
    model = keras.Model(inputs, layers.Dense(WORDS)(x)[:, :-1])
    cost, traced = keras.losses.SparseCategoricalCrossentropy(from_logits=True), []

    def loss(labels: Any, logits: Any) -> Any:
        traced.append(labels)
        return cost(labels, logits)

    model.compile("sgd", loss)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Your input ran out of data")
        losses = model.fit(
            data().map(lambda read, labels: (tf.one_hot(read, WORDS), labels)), epochs=2, verbose=0
        ).history["loss"]
    return [losses, len(traced), *(weight.tolist() for weight in model.get_weights())]


def by_hand() -> list[Any]:
    """The same in a loop; the step takes its batch itself."""
    weights = [tf.Variable(tf.random.stateless_normal((WIDTH, WIDTH), (seed, 1)) * 0.2) for seed in range(6)]
    words = tf.Variable(tf.random.stateless_normal((WORDS, WIDTH), (9, 1)))

    @tf.function
    def step(iterator: Any) -> Any:
        read, labels = next(iterator)
        with tf.GradientTape() as tape:
            x = tf.gather(words, read)[:, :-1]
            for weight in weights:
                x = tf.nn.relu(x @ weight)
            logits = tf.einsum("bsw,vw->bsv", x, words)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(0.1 * gradient)
        return loss

    losses = []
    for _ in range(2):
        iterator = iter(data())
        losses += [float(step(iterator)) for _ in LENGTHS]
        try:
            step(iterator)
        except tf.errors.OutOfRangeError:
            losses.append(0.0)
    traced = step.experimental_get_tracing_count()
    return [losses, traced, *(weight.numpy().tolist() for weight in weights)]


def main(run: Any) -> dict[str, Any]:
    """Without LMS, then with a step of which every kibibyte may go."""
    plain = run()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        lms.enable(policy="all", min_tensor_bytes=1 << 12)
        same = run() == plain
        report = lms.report()
    return {
        "same": same,
        "tensors": [graph.tensors for graph in report.edited],
        "needed": [(graph.peak_before_bytes or 0) - graph.base_bytes for graph in report.edited],
        "said": [str(one.message) for one in caught if "is again for" in str(one.message)],
    }


if __name__ == "__main__":
    print(json.dumps(main({"keras": by_keras, "loop": by_hand}[sys.argv[1]])))
