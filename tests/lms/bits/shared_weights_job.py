"""Train random steps that use weights several times, in branches and loops too, with and without LMS."""

import json
import sys
from collections.abc import Callable
from random import Random
from typing import Any

import tensorflow as tf

import lms

SIDE, ROWS, WEIGHTS, CALLS = 64, 256, 3, 4
WAYS: dict[str, dict[str, Any]] = {"swap": {}, "recompute": {"recompute": "only"}}


def use(kind: str, x: Any, weight: Any, flag: Any) -> Any:
    """Return what a layer of a kind makes of its input."""
    if kind == "branch":
        return tf.cond(flag, lambda: tf.nn.tanh(x @ weight), lambda: x @ weight * 0.5)
    if kind == "case":
        ways = [lambda: tf.nn.tanh(x @ weight), lambda: x @ weight * 0.5, lambda: x]
        return tf.switch_case(tf.cast(flag, tf.int32), ways)
    if kind == "loop":
        turns = tf.constant(0), x
        return tf.while_loop(
            lambda turn, _: turn < 2, lambda turn, y: (turn + 1, tf.nn.tanh(y @ weight)), turns
        )[1]
    return tf.nn.tanh(x * x @ weight) + x if kind == "skip" else tf.nn.tanh(x @ weight)


def make(seed: int) -> tuple[Callable[[], Any], list[Any]]:
    """Return a training step and its weights."""
    chance = Random(seed)  # noqa: S311 - the same in each process
    weights = [
        tf.Variable(tf.random.stateless_normal((SIDE, SIDE), (seed, one)) / 9) for one in range(WEIGHTS)
    ]
    scale, flag = tf.Variable(1.0), tf.Variable(chance.random() < 1 / 2)
    kinds = ("plain", "branch", "case", "loop", "skip")
    uses = [(chance.choice(kinds), chance.randrange(WEIGHTS)) for _ in range(chance.randint(5, 8))]

    @tf.function
    def step() -> Any:
        with tf.GradientTape() as tape:
            x, means = tf.fill([ROWS, SIDE], 0.3) * scale, []
            for kind, number in uses:
                x = use(kind, x, weights[number], flag)
                means.append(tf.reduce_mean(x))
            loss = tf.add_n(means)
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            if gradient is not None:
                weight.assign_sub(0.1 * gradient)
        return loss

    return step, weights


def train(seed: int) -> list[bytes]:
    """Return the losses and the weights of a few steps."""
    step, weights = make(seed)
    losses = [step().numpy().tobytes() for _ in range(CALLS)]
    return losses + [weight.numpy().tobytes() for weight in weights]


def main() -> None:
    """Print the seeds that train to other bits, and how many steps were edited."""
    seeds = range(int(sys.argv[1]), int(sys.argv[1]) + int(sys.argv[2]))
    alone = {seed: train(seed) for seed in seeds}
    found: dict[str, Any] = {"chance": [seed for seed in seeds if train(seed) != alone[seed]]}
    for way, options in WAYS.items():
        lms.enable(policy="all", min_tensor_bytes=4096, **options)
        differ = [seed for seed in seeds if train(seed) != alone[seed]]
        found[way] = differ, len(lms.report().edited)
        lms.disable()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
