"""Feeds batches that grow, in ways that hide their sizes or the calls; prints the planned peaks."""

import json
import sys
import warnings
from typing import Any

import numpy as np
import tensorflow as tf

import lms

SIDE, CHANNELS = 16, 8


def iterators() -> None:
    """Call a function with iterators of one batch each."""
    shapes = [(3, 3, CHANNELS if layer else 3, CHANNELS) for layer in range(5)]
    weights = [tf.Variable(tf.random.stateless_normal(shape, (1, 2)) / 10) for shape in shapes]

    @tf.function(reduce_retracing=True)
    def step(iterator: Any) -> Any:
        x = next(iterator)
        with tf.GradientTape() as tape:
            for weight in weights:
                x = tf.nn.relu(tf.nn.conv2d(x, weight, 1, "SAME"))
            loss = tf.reduce_mean(x)
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(0.1 * gradient)
        return loss

    for rows in (8, 16, 64):
        step(iter(tf.data.Dataset.from_tensors(tf.ones((rows, SIDE, SIDE, 3)))))


def train_on_batch() -> None:
    """Fit a model of tf_keras, and then train it on one larger batch."""
    keras, layers = tf.keras, tf.keras.layers
    x = inputs = layers.Input((SIDE, SIDE, 3))
    for _ in range(5):
        x = layers.Conv2D(CHANNELS, 3, padding="same", activation="relu")(x)
    model = keras.Model(inputs, layers.Dense(2)(layers.GlobalAveragePooling2D()(x)))
    model.compile("sgd", "mse")
    images, labels = np.ones((64, SIDE, SIDE, 3), "float32"), np.zeros((64, 2), "float32")
    model.fit(images, labels, batch_size=16, verbose=0)
    model.train_on_batch(images, labels)


def called_while_traced() -> None:
    """Call a function several times while another one is traced."""
    weights = [tf.Variable(tf.random.stateless_normal((64, 64), (layer, 1)) / 8) for layer in range(5)]

    @tf.function(input_signature=[tf.TensorSpec([None, 64])])
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            for weight in weights:
                x = tf.nn.tanh(x @ weight)
            loss = tf.reduce_mean(x)
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(gradient)
        return loss

    @tf.function
    def outer() -> Any:
        with tf.init_scope():
            for rows in (64, 256, 1024):
                step(tf.ones([rows, 64]))
        return tf.constant(1.0)

    step.get_concrete_function()
    outer()


def main() -> None:
    """Print the planned peaks of the steps alone, in bytes, and the warnings of growth."""
    lms.enable(policy="all", min_tensor_bytes=1024)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ways = {one.__name__: one for one in (iterators, train_on_batch, called_while_traced)}
        ways[sys.argv[1]]()
    peaks = [(graph.planned_peak_bytes or 0) - graph.base_bytes for graph in lms.report().edited]
    said = [str(one.message) for one in caught if "was planned for" in str(one.message)]
    print(json.dumps({"peaks": peaks, "said": said}))


if __name__ == "__main__":
    main()
