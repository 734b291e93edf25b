"""Trains LSTMs: by a loop with lists, unrolled, and on many lengths; prints what is warned of, as JSON."""

import json
import os
import warnings
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["TF_CPU_ALLOCATOR_USE_BFC"] = "true"

import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

import lms  # noqa: E402
from lms.enable import LMSWarning  # noqa: E402

STEPS, UNITS = 30, 64


def told_of(seen: list[warnings.WarningMessage]) -> dict[str, Any]:
    """Switch off, and return what was told of loops, the lines that it names, and the report."""
    report = lms.report()
    lms.disable()
    told = [one for one in seen if issubclass(one.category, LMSWarning) and "loop" in str(one.message)]
    return {
        "told": [str(one.message) for one in told],
        "here": [one.filename == __file__ for one in told],
        "tensors": report.edited[-1].tensors if report.edited else 0,
        "error": report.peak_error,
        "report": str(report),
    }


def fit(*, unroll: bool) -> dict[str, Any]:
    """The warnings of one training, the lines they name, and the report."""
    keras = tf.keras
    lstm = keras.layers.LSTM(UNITS, unroll=unroll)
    model = keras.Sequential([keras.Input((STEPS, UNITS)), lstm, keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    lms.enable(policy="all", min_tensor_bytes=1024)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        model.fit(np.ones((64, STEPS, UNITS), "f"), np.ones((64, 1), "f"), batch_size=32, verbose=0)
    return told_of(seen)


def fit_on_lengths() -> list[str]:
    """The warnings of a training whose batches are longer and longer; two layers, each traced every time."""
    keras = tf.keras
    lstms = [keras.layers.LSTM(UNITS, return_sequences=True), keras.layers.LSTM(UNITS)]
    model = keras.Sequential([keras.Input((None, UNITS)), *lstms, keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    batches = [(np.ones((32, length, UNITS), "f"), np.ones((32, 1), "f")) for length in (10, 20, 30)]
    specs = tf.TensorSpec((None, None, UNITS)), tf.TensorSpec((None, 1))
    lms.enable(policy="all", min_tensor_bytes=1024)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        model.fit(tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=specs), verbose=0)
    lms.disable()
    return [str(one.message) for one in seen if issubclass(one.category, LMSWarning)]


def over_a_dataset() -> dict[str, Any]:
    """A function that is called with a dataset and goes through it: the body of its loop is the step."""
    weights = [tf.Variable(tf.random.stateless_normal((UNITS, UNITS), (seed, 1)) * 0.1) for seed in range(8)]
    rows = tf.data.Dataset.from_tensor_slices(tf.ones((1200, UNITS)))

    @tf.function
    def epoch(batches: Any) -> None:
        for x in batches:
            with tf.GradientTape() as tape:
                for weight in weights:
                    x = tf.tanh(x @ weight)
                loss = tf.reduce_sum(x * x)
            for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
                weight.assign_sub(1e-4 * gradient)

    lms.enable(policy="all", min_tensor_bytes=1024)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for size in (256, 512, 256):
            epoch(rows.batch(size).prefetch(1))
    report = lms.report()
    lms.disable()
    bodies = [(graph.tensors, graph.bytes_out) for graph in report.edited]
    return {"bodies": bodies, "told": report.warnings, "traces": epoch.experimental_get_tracing_count()}


def until_the_data_say() -> dict[str, Any]:
    """What is told of a function with a loop that the data end; and the report."""
    weight = tf.Variable(tf.random.stateless_normal((UNITS, UNITS), (1, 1)) * 0.1)
    rows = tf.random.stateless_normal((512, UNITS), (2, 2))

    @tf.function
    def step(x: Any) -> None:
        with tf.GradientTape() as tape:
            going = lambda i, state: tf.logical_and(i < STEPS, tf.reduce_sum(state * state) > -1.0)  # noqa: E731
            turn = lambda i, state: (i + 1, tf.tanh(state @ weight + x))  # noqa: E731
            _, state = tf.while_loop(going, turn, (0, x))
            loss = tf.reduce_sum(tf.sin(state) ** 2)
        weight.assign_sub(1e-4 * tape.gradient(loss, weight))

    lms.enable(policy="all", min_tensor_bytes=1024)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        step(rows)
        step(rows)
    return told_of(seen)


unknown = until_the_data_say()  # first: the peak that is measured is that of the process
seen = {"loop": fit(unroll=False), "unrolled": fit(unroll=True), "many lengths": fit_on_lengths()}
seen["keras"] = "keras" if hasattr(tf.keras, "ops") else "legacy"  # TensorFlow 2.15 has Keras 2
print(json.dumps({**seen, "unknown": unknown, "dataset": over_a_dataset()}))
