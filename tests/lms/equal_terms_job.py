"""Trains a generator and its critic in one step; prints what differs with and without LMS, as JSON.

The labels are constants, so each loss makes terms of its gradient that another one makes too. TensorFlow
keeps one of these, whose name decides in which order the terms are added.
"""

import json
import os
import warnings
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

import lms  # noqa: E402

keras, layers = tf.keras, tf.keras.layers
BATCH, NOISE, SIZE = 16, 8, 16


def train() -> list[Any]:
    """All weights after two steps from the same start."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(11)
    first = [layers.Input((NOISE,)), layers.Dense(SIZE * SIZE), layers.Reshape((SIZE, SIZE, 1))]
    generator = keras.Sequential([*first, layers.Conv2D(3, 5, padding="same")])
    first = [layers.Input((SIZE, SIZE, 3)), layers.Conv2D(24, 5, padding="same"), layers.LeakyReLU()]
    critic = keras.Sequential([*first, layers.Flatten(), layers.Dense(1)])
    entropy = keras.losses.BinaryCrossentropy(from_logits=True)

    @tf.function  # type: ignore[untyped-decorator]
    def step(noise: Any, real: Any) -> None:
        with tf.GradientTape() as made, tf.GradientTape() as judged:
            fake = generator(noise, training=True)
            of_real, of_fake = critic(real, training=True), critic(fake, training=True)
            fooled = entropy(tf.ones_like(of_fake), of_fake)
            told = entropy(tf.ones_like(of_real), of_real) + entropy(tf.zeros_like(of_fake), of_fake)
        pairs = [(made.gradient(fooled, generator.trainable_variables), generator)]
        pairs.append((judged.gradient(told, critic.trainable_variables), critic))
        for slopes, model in pairs:
            for weight, slope in zip(model.trainable_variables, slopes, strict=True):
                weight.assign_sub(0.05 * slope)

    random = np.random.default_rng(5)
    for _ in range(2):
        noise, real = random.normal(size=(BATCH, NOISE)), random.normal(size=(BATCH, SIZE, SIZE, 3))
        step(tf.constant(noise, tf.float32), tf.constant(real, tf.float32))
    return [weight for model in (generator, critic) for weight in model.get_weights()]


def main() -> dict[str, Any]:
    """By what is swapped how many weights differ and how many tensors were swapped."""
    warnings.simplefilter("ignore")
    off, seen = train(), {}
    for name, chosen in {"all": (), "nothing": ("NoSuchType",)}.items():
        lms.enable(policy="all", min_tensor_bytes=1024, incl_types=chosen)
        on = train()
        swapped = sum(graph.tensors for graph in lms.report().graphs)
        lms.disable()
        seen[name] = (
            sum(one.tobytes() != other.tobytes() for one, other in zip(off, on, strict=True)),
            swapped,
        )
    return seen


print(json.dumps(main()))
