"""Trains two epochs of a known number of batches of open length, without LMS and with it; prints JSON."""

import hashlib
import json
import os
import warnings
from collections.abc import Iterator
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

import lms  # noqa: E402

keras, layers = tf.keras, tf.keras.layers
LENGTHS = (30, 40, 25)


def batches() -> Iterator[tuple[Any, Any]]:
    """Rows of numbers, as many a row as the batch is long, and the label of each."""
    for length in LENGTHS:
        random = np.random.default_rng(length)
        yield random.integers(0, 50, (32, length)), random.integers(0, 2, 32)


def train() -> str:
    """A digest of the weights after two epochs."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(1)
    signature = (tf.TensorSpec((32, None), tf.int64), tf.TensorSpec((32,), tf.int64))
    dataset = tf.data.Dataset.from_generator(batches, output_signature=signature)
    dataset = dataset.apply(tf.data.experimental.assert_cardinality(len(LENGTHS)))
    words = layers.Input((None,), dtype="int64")
    x = layers.Embedding(50, 64)(words)
    x = layers.LayerNormalization()(x + layers.Dense(64)(layers.Dense(64, "relu")(x)))
    model = keras.Model(words, layers.Dense(2)(layers.GlobalAveragePooling1D()(x)))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.AdamW(1e-3, weight_decay=0.1), loss)
    model.fit(dataset, epochs=2, verbose=0)
    return hashlib.sha256(b"".join(weights.tobytes() for weights in model.get_weights())).hexdigest()


def main() -> dict[str, Any]:
    """Both digests, and how many tensors were swapped."""
    warnings.simplefilter("ignore")
    off = train()
    lms.enable(policy="all", min_tensor_bytes=1024)
    on = train()
    swapped = sum(graph.tensors for graph in lms.report().graphs)
    return {"off": off, "on": on, "swapped": swapped}


print(json.dumps(main()))
