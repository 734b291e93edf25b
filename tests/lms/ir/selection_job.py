"""Steps planned with a filter by each road: lms.enable(), a variable, IBM's class; prints their swaps."""

import json
import os
import warnings
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import tensorflow as tf

import lms

FILTER = ("Tanh",)


def planned() -> dict[str, Any]:
    """What LMS makes of the second of two training steps with two kinds of activations."""
    weights = [tf.Variable(tf.random.stateless_normal((64, 64), (seed, 1)) * 0.1) for seed in range(12)]

    def step(x: Any) -> None:
        with tf.GradientTape() as tape:
            for number, weight in enumerate(weights):
                x = (tf.tanh if number % 2 else tf.sigmoid)(x @ weight)
            loss = tf.reduce_sum(x * x)
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(1e-4 * gradient)

    for rows in (512, 1024):
        step.__name__ = f"step{rows}"
        tf.function(step)(tf.ones((rows, 64)))
    *_, latest = lms.report().edited
    return {
        "tensors": latest.tensors,
        "stay": {why: count for why, count in latest.rejected if why.startswith(("excl", "not incl"))},
    }


def enabled(**overrides: Any) -> dict[str, Any]:
    lms.enable(policy="threshold", lb=2, **overrides)
    try:
        return planned()
    finally:
        lms.disable()


def of_class() -> dict[str, Any]:
    from lms.compat.classes import LMSKerasCallback

    callback = LMSKerasCallback(lb=2, excl_types=FILTER)
    callback.set_model(None)
    try:
        return planned()
    finally:
        callback.on_train_end()
        lms.disable()


def main() -> dict[str, Any]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        seen: dict[str, Any] = {"variable": {}, "plain": enabled()}
        said = [str(one.message) for one in caught]
    warnings.simplefilter("ignore")
    seen["warnings"] = [text for text in said if "matches nothing" in text]
    seen["enable"] = enabled(excl_types=FILTER)
    os.environ["LMS_EXCL_TYPES"] = ",".join(FILTER)
    seen["variable"] = enabled()
    del os.environ["LMS_EXCL_TYPES"]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        seen["class"] = of_class()
    said = [str(one.message) for one in caught]
    seen["warnings of the class"] = [text for text in said if "matches nothing" in text]
    return seen


if __name__ == "__main__":
    print(json.dumps(main()))
