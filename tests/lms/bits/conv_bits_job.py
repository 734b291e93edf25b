"""Trains models with and without LMS, arithmetic rewrites off; prints both digests as JSON.

The bias before a normalisation has a gradient of rounding errors alone: any other order of a sum shows. So
does another kernel for the gradient of pooling, where windows overlap or have three dimensions.
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


def normalised() -> Any:
    """Convolutions with biases before normalisations."""
    keras, layers = tf.keras, tf.keras.layers
    stack = [layers.Input((16, 16, 3))]
    for filters in (16, 16, 32):
        stack += [layers.Conv2D(filters, 3, padding="same"), layers.BatchNormalization(), layers.ReLU()]
    return keras.Sequential([*stack, layers.GlobalAveragePooling2D(), layers.Dense(5)])


def pooled(dims: int) -> Any:
    """Poolings whose results are read again further on."""
    keras, layers = tf.keras, tf.keras.layers
    conv = layers.Conv2D if dims == 2 else layers.Conv3D
    pool = layers.MaxPooling2D(3, 2, padding="same") if dims == 2 else layers.MaxPooling3D(2)
    means = layers.GlobalAveragePooling2D if dims == 2 else layers.GlobalAveragePooling3D
    inputs = layers.Input((16, 16, 3))
    x = inputs if dims == 2 else layers.Reshape((16, 8, 6, 1))(inputs)
    for filters in (8, 16):
        x = conv(filters, 3, padding="same", activation="relu")(x)
        x = layers.Add()([conv(filters, 1)(pool(x)), pool(x)])
    return keras.Model(inputs, layers.Dense(5)(means()(x)))


def grouped() -> Any:
    """Convolutions in groups, which Keras has XLA compile: a CPU without oneDNN has no other kernel."""
    keras, layers = tf.keras, tf.keras.layers
    stack = [layers.Input((16, 16, 3)), layers.Conv2D(16, 1)]
    stack += [layers.Conv2D(16, 3, padding="same", groups=4, activation="relu") for _ in range(3)]
    return keras.Sequential([*stack, layers.GlobalAveragePooling2D(), layers.Dense(5)])


def gelu() -> Any:
    """A constant that TensorFlow moves into a product for which others wait."""
    keras, layers = tf.keras, tf.keras.layers
    inputs = layers.Input((16, 16, 3))
    x = layers.Dense(32)(layers.Reshape((256, 3))(inputs))
    for _ in range(2):
        x = layers.LayerNormalization()(layers.Add()([x, layers.Dense(32)(layers.Dense(64, "gelu")(x))]))
    return keras.Model(inputs, layers.Dense(5)(layers.GlobalAveragePooling1D()(x)))


CASES = {
    "sgd": (normalised, "sgd"),
    "adam": (normalised, "adam"),
    "pooling": (lambda: pooled(2), "sgd"),
    "pooling in 3D": (lambda: pooled(3), "sgd"),
    "grouped": (grouped, "sgd"),
    "gelu": (gelu, "adam"),
}


def train(case: str) -> str:
    """Four steps from the same start."""
    keras = tf.keras
    keras.utils.set_random_seed(1)
    build, optimizer = CASES[case]
    model = build()
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    random = np.random.default_rng(0)
    images, labels = random.normal(size=(128, 16, 16, 3)).astype("float32"), random.integers(0, 5, 128)
    model.fit(images, labels, batch_size=32, epochs=1, verbose=0, shuffle=False)
    return hashlib.sha256(b"".join(weights.tobytes() for weights in model.get_weights())).hexdigest()


def main() -> dict[str, Any]:
    """By case the digests without and with, and how many tensors were swapped."""
    warnings.simplefilter("ignore")
    seen = {}
    for case in CASES:
        off = train(case)
        lms.enable(policy="all")
        on = train(case)
        seen[case] = (off, on, sum(graph.tensors for graph in lms.report().graphs))
        lms.disable()
    return seen


print(json.dumps(main()))
