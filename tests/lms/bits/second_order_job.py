"""Trains with a tape in a tape, with and without LMS; prints what it saw as JSON."""

import hashlib
import json
import os
import warnings
from collections.abc import Callable
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import tensorflow as tf  # noqa: E402

import lms  # noqa: E402

STEPS = 20
WEIGHTS = [tf.Variable(tf.random.stateless_normal((64, 64), (seed, 1)) * 0.1) for seed in range(8)]
BATCH = tf.random.stateless_uniform((512, 64), (1, 2))


def scores(x: Any, weights: Any) -> Any:
    """One number a row, through eight layers."""
    for weight in weights:
        x = tf.tanh(x @ weight)
    return tf.reduce_sum(x * x, 1)


def update(tape: Any, loss: Any) -> Any:
    """One step down the slope."""
    for weight, gradient in zip(WEIGHTS, tape.gradient(loss, WEIGHTS), strict=True):
        weight.assign_sub(1e-3 * gradient)
    return loss


def gradient_penalty(x: Any) -> Any:
    """As a critic is trained: the slope by the input shall be 1."""
    with tf.GradientTape() as outer:
        with tf.GradientTape() as inner:
            inner.watch(x)
            score = scores(x, WEIGHTS)
        slope = tf.norm(inner.gradient(score, x), axis=1)
        loss = tf.reduce_mean(score) + 10 * tf.reduce_mean((slope - 1) ** 2)
    return update(outer, loss)


def hessian_product(x: Any) -> Any:
    """Down the product of the Hessian with ones."""
    with tf.GradientTape() as outer:
        with tf.GradientTape() as inner:
            loss = tf.reduce_mean(scores(x, WEIGHTS))
        product = tf.add_n([tf.reduce_sum(part) for part in inner.gradient(loss, WEIGHTS)])
    return update(outer, product)


def after_a_step(x: Any) -> Any:
    """As models are trained to learn fast: down the loss that one step of learning would leave."""
    with tf.GradientTape() as outer:
        with tf.GradientTape() as inner:
            loss = tf.reduce_mean(scores(x, WEIGHTS))
        slopes = inner.gradient(loss, WEIGHTS)
        learnt = [weight - 0.1 * slope for weight, slope in zip(WEIGHTS, slopes, strict=True)]
        later = tf.reduce_mean(scores(x, learnt))
    return update(outer, later)


def trained(step: Callable[[Any], Any], start: list[Any]) -> str:
    """A digest of the weights after some steps."""
    for weight, value in zip(WEIGHTS, start, strict=True):
        weight.assign(value)
    function = tf.function(step)
    for _ in range(STEPS):
        function(BATCH)
    return hashlib.sha256(b"".join(weight.numpy().tobytes() for weight in WEIGHTS)).hexdigest()


def main() -> dict[str, Any]:
    """Each step without and with LMS: the weights of both, and how many tensors were swapped."""
    steps = (gradient_penalty, hessian_product, after_a_step)
    start = [weight.numpy() for weight in WEIGHTS]
    off = {step.__name__: trained(step, start) for step in steps}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lms.enable(policy="all", min_tensor_bytes=4096)
    seen = {}
    for step in steps:
        on = trained(step, start)
        seen[step.__name__] = off[step.__name__], on, lms.report().edited[-1].tensors
    return seen


if __name__ == "__main__":
    print(json.dumps(main()))
