"""Trains models with IBM's callback, and others after them; prints what LMS made of each, as JSON."""

import json
import os
import warnings
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

import lms  # noqa: E402
from lms.compat.classes import LMSKerasCallback  # noqa: E402
from lms.enable import LMSWarning  # noqa: E402

IMAGES, LABELS = np.ones((32, 32, 32, 3), "f"), np.zeros((32, 10), "f")


class Fails(tf.keras.callbacks.Callback):  # type: ignore[misc]
    """Ends the training as a fault of the user's would."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        raise ArithmeticError("fails")


class Prepares(tf.keras.Model):  # type: ignore[misc]
    """Makes the callbacks for a loop that is none of its methods."""

    def callbacks(self) -> Any:
        """With LMS switched on."""
        return tf.keras.callbacks.CallbackList([LMSKerasCallback(lb=3)], model=self)


def fit(*callbacks: Any, jit: bool | str = False) -> Any:
    """Train a new model; a fault of :class:`Fails` ends it as it would end a cell of a notebook."""
    layers = tf.keras.layers
    convolutions = [layers.Conv2D(16, 3, padding="same", activation="relu") for _ in range(4)]
    last = [layers.GlobalAveragePooling2D(), layers.Dense(10)]
    model = tf.keras.Sequential([tf.keras.Input((32, 32, 3)), *convolutions, *last])
    model.compile("sgd", "mse", jit_compile=jit)
    try:
        model.fit(IMAGES, LABELS, batch_size=16, verbose=0, callbacks=list(callbacks))
    except ArithmeticError as error:
        return error  # which keeps the frames of fit
    return model


def train_a_step() -> None:
    """Run a training step that no method of a model calls."""
    weights = [tf.Variable(tf.ones((64, 64)) * 0.01) for _ in range(8)]

    @tf.function
    def step(x: Any) -> None:
        with tf.GradientTape() as tape:
            for weight in weights:
                x = tf.tanh(x @ weight)
        for weight, gradient in zip(weights, tape.gradient(x, weights), strict=True):
            weight.assign_sub(gradient)

    step(tf.ones((1024, 64)))


def state() -> list[Any]:
    """Whether LMS is on, why, and how many graphs were looked at and edited."""
    shown, report = lms.state(), lms.report()
    on = tf.config.experimental.get_lms_enabled()
    return [on, shown.why if shown else None, len(report.graphs), len(report.edited)]


def main() -> dict[str, Any]:
    """The states in turn."""
    lms.compat.install()
    seen: dict[str, Any] = {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        failed = fit(LMSKerasCallback(lb=3), Fails())
        seen["failed"] = [type(failed).__name__, *state()]
        fit(jit=True)
        seen["another after it"] = state()
    seen["warnings"] = [str(one.message) for one in caught if issubclass(one.category, LMSWarning)]
    fit(LMSKerasCallback(lb=3))
    seen["the next with it"] = state()
    fit()
    seen["another after that"] = state()
    fit(LMSKerasCallback(lb=3), Fails())
    train_a_step()
    seen["a step of its own"] = state()
    tf.config.experimental.set_lms_enabled(True)
    seen["enabled"] = state()
    lms.disable()
    lms.enable(policy="all")
    fit(LMSKerasCallback(n_tensors=0), Fails())
    seen["kept off"] = state()
    fit()
    seen["another in the job"] = state()
    fit(LMSKerasCallback(lb=3), Fails())
    fit()
    seen["after a failure in the job"] = state()
    lms.disable()
    model = fit(LMSKerasCallback(lb=3))
    model.fit(IMAGES, LABELS, batch_size=32, verbose=0, callbacks=[LMSKerasCallback(lb=3)])
    seen["larger batches"] = [graph.planned_peak_bytes for graph in lms.report().graphs]
    lms.disable()
    model = fit()
    model.fit(IMAGES, LABELS, batch_size=32, verbose=0, callbacks=[LMSKerasCallback(lb=3)])
    seen["trained without it before"] = [graph.planned_peak_bytes for graph in lms.report().graphs]
    lms.disable()
    callbacks = Prepares().callbacks()
    callbacks.on_train_begin()
    train_a_step()
    seen["a loop of its own"] = state()
    callbacks.on_train_end()
    seen["behind it"] = state()
    return seen


print(json.dumps(main()))
