"""Trains a step whose shapes are computed from shapes; prints as JSON what stays open, by the specification.

The gradient of a concatenation of more than sixteen tensors splits by sizes that the graph computes, as that
of ``UpSampling3D`` of tf_keras does.
"""

import json
import os
from collections.abc import Callable
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import tensorflow as tf  # noqa: E402

import lms  # noqa: E402

COLUMNS = 20
SHAPE = (32, COLUMNS, 64)


def step_of(weights: list[Any]) -> Callable[[Any], None]:
    """A training step."""

    def step(x: Any) -> None:
        with tf.GradientTape() as tape:
            for weight in weights:
                parts = [tf.tanh(part) for part in tf.split(x @ weight, COLUMNS, axis=1)]
                x = tf.concat([one for part in parts for one in (part, part)], axis=1)[:, ::2]
            loss = tf.reduce_sum(x * x)
        for weight, slope in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(1e-4 * slope)

    return step


def through(step: Callable[[Any], None]) -> Callable[[Any], Any]:
    """A function that takes the step for each batch of a dataset, and counts them: the count is a scalar."""

    def epoch(dataset: Any) -> Any:
        count = 0
        for x in dataset:
            step(x)
            count += 1
        return count

    return epoch


def trained(*spec: int | None, by_iterator: bool = False, by_loop: bool = False) -> dict[str, Any]:
    """Plan and run one step whose argument, or batch, has this specification."""
    step = step_of([tf.Variable(tf.eye(64)) for _ in range(4)])
    lms.enable(policy="all", min_tensor_bytes=1)
    if by_iterator:
        batches = iter(tf.data.Dataset.from_tensors(tf.ones(SHAPE)))
        tf.function(lambda given: step(next(given)))(batches)
    elif by_loop:
        tf.function(through(step))(tf.data.Dataset.from_tensor_slices(tf.ones(SHAPE)).batch(SHAPE[0]))
    else:
        tf.function(step, input_signature=[tf.TensorSpec(spec)])(tf.ones(SHAPE))
    found = lms.report().graphs[-1]
    lms.disable()
    count = 0 if found.open_sizes is None else found.open_sizes.count
    return {"open": count, "planned": found.planned_peak_bytes, "swapped": found.tensors}


found = {
    "known": trained(*SHAPE),
    "open": trained(None, *SHAPE[1:]),
    "iterator": trained(*SHAPE, by_iterator=True),
    "loop": trained(*SHAPE, by_loop=True),
}
print(json.dumps(found))
