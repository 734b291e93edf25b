"""Trains a step that fits for certain, and one that does not; prints as JSON what was read of them."""

import json
import os
import sys
import warnings
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["TF_CPU_ALLOCATOR_USE_BFC"] = "true"

import tensorflow as tf  # noqa: E402

import lms  # noqa: E402
from lms.engine import installation  # noqa: E402
from lms.passes import reading  # noqa: E402

LAYERS, SIZE = 12, 256
AMPLE = 4 << 30


def step() -> Any:
    """A deep step whose tensors take several times the memory that it needs at once."""
    weights = [tf.Variable(tf.eye(SIZE)) for _ in range(LAYERS)]

    @tf.function
    def train(x: Any) -> Any:
        with tf.GradientTape() as tape:
            for weight in weights:
                x = tf.nn.tanh(tf.matmul(x, weight))
            loss = tf.reduce_sum(x)
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(0.01 * gradient)
        return loss

    return train


def run(limit_bytes: int | None, **config: Any) -> dict[str, Any]:
    """Train one step on a device of ``limit_bytes``; what was read before the report was made."""
    lms.enable(policy="auto", **config)
    installation.engine().resources.assume_limit(limit_bytes)
    read, read_step = [], reading.read_step
    reading.read_step = lambda *args: read.append(1) or read_step(*args)
    step()(tf.ones((SIZE, SIZE)))
    before = len(read)
    (graph,) = lms.report().graphs
    again = lms.report().graphs
    reading.read_step = read_step
    lms.disable()
    return {
        "read": before,
        "read_for_the_report": len(read) - before,
        "why": graph.why,
        "ops": graph.ops,
        "base": graph.base_bytes,
        "peak": graph.peak_before_bytes - graph.base_bytes,
        "again": again == (graph,),
    }


def main() -> None:
    """Try devices that are ample, unknown, and large enough only for what is alive at once."""
    warnings.simplefilter("ignore")
    ample, unknown, debug = run(AMPLE), run(None), run(AMPLE, debug=True)
    tight = run(debug["base"] + debug["peak"] * 3 // 2)
    found = {"ample": ample, "unknown": unknown, "debug": debug, "tight": tight}
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
