"""Trains small models as they are and with LMS; prints for each both digests and what was swapped, as JSON.

The first run is the script of somebody who does not know of LMS: TensorFlow's settings are its own.
"""

import hashlib
import json
import os
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

import lms  # noqa: E402

keras, layers = tf.keras, tf.keras.layers
RANDOM = np.random.default_rng(0)
IMAGES = RANDOM.normal(size=(64, 16, 16, 3)).astype("float32")
VOLUMES = RANDOM.normal(size=(32, 8, 8, 8, 2)).astype("float32")
ROWS = RANDOM.normal(size=(64, 32)).astype("float32")


def stack(*parts: Any) -> Any:
    """Layers one after the other, and a head for five classes."""
    return keras.Sequential([*parts, layers.Dense(5)])


def dense(activation: str) -> tuple[Any, Any]:
    """Two layers, whose bias and activation are merged into them."""
    return stack(layers.Input((32,)), layers.Dense(64, activation), layers.Dense(64, activation)), ROWS


def convolutions() -> tuple[Any, Any]:
    """Biases before a normalisation, whose gradients are rounding errors: any other order of a sum shows."""
    parts = [layers.Input((16, 16, 3))]
    for filters in (16, 16, 32):
        parts += [layers.Conv2D(filters, 3, padding="same"), layers.BatchNormalization()]
        parts += [layers.ReLU()]
    return stack(*parts, layers.GlobalAveragePooling2D()), IMAGES


def branches() -> tuple[Any, Any]:
    """Convolutions beside a pooling whose windows overlap, and a dropout with a seed."""
    image = layers.Input((16, 16, 3))
    x = image
    for _ in range(2):
        parts = [layers.Conv2D(8, size, padding="same", activation="relu")(x) for size in (1, 3)]
        parts.append(layers.Conv2D(8, 1)(layers.MaxPooling2D(3, 1, padding="same")(x)))
        x = layers.Concatenate()(parts)
    x = layers.Dropout(0.3, seed=3)(layers.Flatten()(x))
    return keras.Model(image, layers.Dense(5)(x)), IMAGES


def connected() -> tuple[Any, Any]:
    """Concatenations that a normalisation reads: on the CPU it becomes one kernel with its activation."""
    image = layers.Input((16, 16, 3))
    x = layers.Conv2D(24, 3, padding="same")(image)
    for _ in range(3):
        branch = layers.ReLU()(layers.BatchNormalization()(x))
        x = layers.Concatenate()([x, layers.Conv2D(12, 3, padding="same", use_bias=False)(branch)])
    return keras.Model(image, layers.Dense(5)(layers.GlobalAveragePooling2D()(x))), IMAGES


def squeezed() -> tuple[Any, Any]:
    """Depthwise convolutions, scaled by channel, with ``swish``."""
    image = layers.Input((16, 16, 3))
    x = layers.Conv2D(16, 3, padding="same", activation="swish")(image)
    branch = layers.Activation("swish")(layers.BatchNormalization()(layers.Conv2D(32, 1)(x)))
    branch = layers.DepthwiseConv2D(3, padding="same", use_bias=False)(branch)
    branch = layers.Activation("swish")(layers.BatchNormalization()(branch))
    scale = layers.GlobalAveragePooling2D(keepdims=True)(branch)
    scale = layers.Conv2D(32, 1, activation="sigmoid")(layers.Conv2D(8, 1, activation="swish")(scale))
    x = layers.Add()([x, layers.Conv2D(16, 1)(layers.Multiply()([branch, scale]))])
    return keras.Model(image, layers.Dense(5)(layers.GlobalAveragePooling2D()(x))), IMAGES


def hard_swish() -> tuple[Any, Any]:
    """A product divided by a constant, and the slope of the constant, which nobody wants."""
    active = layers.Activation(lambda x: x * (tf.nn.relu6(x + 3.0) / 6.0))
    image = layers.Input((16, 16, 3))
    x = active(layers.Conv2D(16, 3, padding="same")(image))
    x = active(layers.DepthwiseConv2D(3, padding="same")(x))
    return keras.Model(image, layers.Dense(5)(layers.GlobalAveragePooling2D()(x))), IMAGES


def volumes() -> tuple[Any, Any]:
    """In three dimensions, up and down."""
    parts = [layers.Conv3D(8, 3, padding="same", activation="relu"), layers.BatchNormalization()]
    parts += [layers.MaxPooling3D(), layers.Conv3D(8, 3, padding="same"), layers.LeakyReLU()]
    parts += [layers.Conv3DTranspose(4, 2, strides=2), layers.GlobalAveragePooling3D()]
    return stack(layers.Input((8, 8, 8, 2)), *parts), VOLUMES


def normalised() -> tuple[Any, Any]:
    """Sums of three, which Grappler makes one of."""
    parts = [layers.Dense(64), layers.LayerNormalization(), layers.ReLU(), layers.Dense(64)]
    return stack(layers.Input((32,)), *parts, layers.LayerNormalization()), ROWS


MODELS: dict[str, tuple[Callable[[], tuple[Any, Any]], Any]] = {
    "dense tanh": (lambda: dense("tanh"), "adagrad"),
    "dense gelu": (lambda: dense("gelu"), "adam"),
    "convolutions": (convolutions, "adam"),
    "branches": (branches, "rmsprop"),
    "connected": (connected, "sgd"),
    "squeezed": (squeezed, "sgd"),
    "hard swish": (hard_swish, "sgd"),
    "volumes": (volumes, "sgd"),
    "normalised": (normalised, "adam"),
}


def train(build: Callable[[], tuple[Any, Any]], optimizer: str) -> str:
    """Two steps from the same start."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(1)
    model, inputs = build()
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    labels = np.arange(len(inputs)) % 5
    model.fit(inputs, labels, batch_size=len(inputs) // 2, epochs=1, verbose=0, shuffle=False)
    return digest(model)


def train_in_loop() -> str:
    """Two steps in one call of a function, in a loop of TensorFlow's own."""
    keras.utils.set_random_seed(1)
    model, inputs = convolutions()
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build(model.trainable_variables)
    cost = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    batches = iter(tf.data.Dataset.from_tensor_slices((inputs, np.arange(len(inputs)) % 5)).batch(32, True))

    @tf.function
    def steps(batches: Any) -> None:
        for _ in tf.range(2):
            images, labels = next(batches)
            with tf.GradientTape() as tape:
                loss = cost(labels, model(images, training=True))
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    steps(batches)
    return digest(model)


def train_critic() -> str:
    """Two steps that hold the slope of a model at 1: gradients of gradients, which are products of many."""
    keras.utils.set_random_seed(1)
    model, inputs = stack(layers.Input((32,)), *[layers.Dense(64, "tanh") for _ in range(4)]), ROWS
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build(model.trainable_variables)

    @tf.function
    def step(rows: Any) -> None:
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                inner.watch(rows)
                score = tf.reduce_sum(model(rows, training=True), 1)
            slope = tf.norm(inner.gradient(score, rows), axis=1)
            loss = tf.reduce_mean(score) + 10 * tf.reduce_mean((slope - 1) ** 2)
        gradients = outer.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    for _ in range(2):
        step(tf.constant(inputs))
    return digest(model)


def digest(model: Any) -> str:
    """Of all weights of a model."""
    return hashlib.sha256(b"".join(weights.tobytes() for weights in model.get_weights())).hexdigest()


def main() -> dict[str, Any]:
    """By model the digests without and with LMS, and how many tensors were swapped."""
    warnings.simplefilter("ignore")
    seen = {}
    ways = {name: partial(train, *made) for name, made in MODELS.items()}
    for name, way in {**ways, "loop": train_in_loop, "critic": train_critic}.items():
        off = way()
        lms.enable(policy="all", min_tensor_bytes=1024)
        on = way()
        seen[name] = (off, on, sum(graph.tensors for graph in lms.report().graphs))
        lms.disable()
    return seen


print(json.dumps(main()))
