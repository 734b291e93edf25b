"""Trains a few steps under LMS as a rank would, and tells what lay in the folders afterwards."""

import json
import os
import sys
import time
from pathlib import Path

import tensorflow as tf

import lms

lms.enable(policy="all")


def main(folder: Path) -> dict[str, object]:
    weight = tf.Variable(tf.random.stateless_normal((256, 256), (1, 2)))

    @tf.function
    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            y = x
            for _ in range(6):
                y = tf.tanh(y @ weight)
            loss = tf.reduce_sum(y)
        weight.assign_sub(1e-4 * tape.gradient(loss, weight))
        return loss

    x = tf.ones((512, 256))
    for _ in range(3):
        step(x)
    first = json.loads((folder / "lms-status.1.json").read_text())
    until = time.monotonic() + 1.0
    while time.monotonic() < until:
        step(x)
    step(x)
    return {
        "first": first,
        "last": json.loads((folder / "lms-status.1.json").read_text()),
        "pid": os.getpid(),
    }


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
