"""Trains one step as XLA compiles it: whole, or in segments between swaps; prints JSON."""

import importlib
import json
import os
import sys
import warnings
from typing import Any

way, policy, budget_mib, case, limit_mib = sys.argv[1:6]
os.environ |= {
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "TF_CPU_ALLOCATOR_USE_BFC": "1",
    "TF_CPU_BFC_MEM_LIMIT_IN_MB": limit_mib,
}

import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402
from tensorflow.python.eager import context  # noqa: E402

import lms  # noqa: E402
from lms.errors import LMSWarning  # noqa: E402

WIDTH, LAYERS, ROWS = 256, 6, 1024


def drawn(rows: int, seed: int) -> Any:
    """Draw on the device: an array of NumPy may lie outside of its memory until it is written to."""
    return tf.random.stateless_normal((rows, WIDTH), (5, seed))


def step_of(weights: list[Any]) -> Any:
    """A step that its user has XLA compile: layers with gelu, and plain descent."""
    bias, total = tf.Variable(tf.zeros(WIDTH)), tf.Variable(0.0)

    def with_bias(made: Any) -> Any:
        """Add what TensorFlow would fuse with a product, and what leaves a constant behind an op."""
        made = tf.nn.bias_add(made, bias)
        mean, variance = tf.nn.moments(made, -1, keepdims=True)
        return made + (mean - variance)

    @tf.function(jit_compile=True)
    def train(rows: Any, unread: Any = None) -> Any:
        with tf.GradientTape() as tape:
            made = rows
            for weight in weights:
                made = tf.matmul(made, weight)
                if case == "sums":  # of terms that others read, too
                    terms = [tf.tanh(made + 0.1 * number) for number in range(3)]
                    made = tf.add_n(terms) * tf.sigmoid(terms[0])
                made = tf.nn.gelu(with_bias(made) if case == "one segment" else made)
            loss = tf.reduce_mean(tf.square(made - rows))
            if case == "calls_numpy":
                loss += tf.numpy_function(np.zeros_like, [loss], tf.float32)
        for weight, slope in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(0.05 * slope)
        return tf.math.divide_no_nan(total.assign_add(loss), 1.0) if case == "one segment" else loss

    return train


def looped(train: Any) -> Any:
    """The step in a loop of the graph, as Keras writes it for ``steps_per_execution``."""

    def run(rows: Any) -> Any:
        loss = tf.constant(0.0)
        for _ in tf.range(1):
            loss = train(rows)
        return loss

    return run


def calls(train: Any) -> list[Any]:
    """Four calls of the step: its own, with more rows at last, of its trace, or of two functions around."""
    if case == "growing":
        return [train, train, *([lambda rows: train(tf.tile(rows, [4, 1]))] * 2)]
    if case == "in a loop":
        return [tf.function(looped(train))] * 4
    if case == "unread argument":
        return [lambda rows: train(rows, tf.ones((3,)))] * 4
    if case in ("traced first", "traced last"):
        traced = train.get_concrete_function(tf.TensorSpec((ROWS, WIDTH), tf.float32))
        return [traced, traced, train, train] if case == "traced first" else [train, train, traced, traced]
    if case != "callers":
        return [train] * 4
    first, second = tf.function(lambda rows: train(rows)), tf.function(lambda rows: 2.0 * train(rows))
    return [first, first, second, second]


def main() -> None:
    """Train for four steps."""
    texts = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if case == "hopeful":
            importlib.import_module("lms.passes.planning").fits_whole = lambda *_: True
        if case == "slow calls":
            importlib.import_module("lms.planner.segments").CALL_S = 10.0
        if way != "without":
            given = {"budget_bytes": int(float(budget_mib) * 2**20)} if budget_mib != "-" else {}
            given |= {"recompute": case} if case == "only" else {}
            given |= {"bandwidth_gb_s": 0.01} if case in ("slow link", "slow calls") else {}
            given |= {"xla": way} if way != "default" else {}
            lms.enable(policy=policy, **given)
        weights = [tf.Variable(drawn(WIDTH, number) * WIDTH**-0.5) for number in range(LAYERS)]
        if case == "asynchronous":
            tf.config.experimental.set_synchronous_execution(False)
        rows = drawn(ROWS, LAYERS)
        train = step_of(weights)
        resident = tf.config.experimental.get_memory_info("CPU:0")["current"]
        if case == "evaluates":
            tf.function(lambda: tf.matmul(rows, weights[0]), jit_compile=True)()
        losses = [float(train(rows)) for train in calls(train)]
        texts = [str(one.message) for one in caught if issubclass(one.category, LMSWarning)]
    report = lms.report()
    edited = [one for one in report.graphs if one.segments or one.edited]
    print(
        json.dumps(
            {
                "losses": losses,
                "bits": [weight.numpy().tobytes().hex()[:64] for weight in weights],
                "peak": tf.config.experimental.get_memory_info("CPU:0")["peak"],
                "resident": resident,
                "planned": report.planned_peak_bytes if way != "without" else None,
                "whole": [one.why for one in report.graphs if one.whole],
                "copies": [name for name in context.context().list_function_names() if "without_xla" in name],
                "segments": sum(one.segments for one in edited),
                "steps": len([one for one in edited if one.segments]),
                "swapped": sum(one.tensors for one in edited),
                "executed": sum(one.executed or 0 for one in edited),
                "recomputed": sum(one.recomputed.ops for one in edited if one.recomputed),
                "first_run": [one.first_run_s for one in edited],
                "text": str(report),
                "warnings": texts,
                "flags": os.environ.get("TF_XLA_FLAGS", ""),
            }
        )
    )


main()
