"""Trains convolutions with biases and batch normalisation with and without LMS; prints both digests as JSON.

The bias before a normalisation has a gradient of rounding errors alone: any other order of a sum shows.
"""

import hashlib
import json
import os
import warnings
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

import lms  # noqa: E402


def train(optimizer: str) -> str:
    """Four steps from the same start."""
    keras, layers = tf.keras, tf.keras.layers
    keras.utils.set_random_seed(1)
    stack = [layers.Input((16, 16, 3))]
    for filters in (16, 16, 32):
        stack += [layers.Conv2D(filters, 3, padding="same"), layers.BatchNormalization(), layers.ReLU()]
    model = keras.Sequential([*stack, layers.GlobalAveragePooling2D(), layers.Dense(5)])
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    random = np.random.default_rng(0)
    images, labels = random.normal(size=(128, 16, 16, 3)).astype("float32"), random.integers(0, 5, 128)
    model.fit(images, labels, batch_size=32, epochs=1, verbose=0, shuffle=False)
    return hashlib.sha256(b"".join(weights.tobytes() for weights in model.get_weights())).hexdigest()


def main() -> dict[str, Any]:
    """By optimizer the digests without and with, and how many tensors were swapped."""
    warnings.simplefilter("ignore")
    tf.config.optimizer.set_experimental_options({"arithmetic_optimization": False})
    seen = {}
    for optimizer in ("sgd", "adam"):
        off = train(optimizer)
        lms.enable(policy="all")
        on = train(optimizer)
        seen[optimizer] = (off, on, sum(graph.tensors for graph in lms.report().graphs))
        lms.disable()
        tf.config.optimizer.set_experimental_options({"arithmetic_optimization": False})
    return seen


print(json.dumps(main()))
