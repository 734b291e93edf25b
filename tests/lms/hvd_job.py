"""What each of two ranks does for ``test_hvd.py``; rank 0 prints one JSON object of findings.

Run with ``TF_USE_LEGACY_KERAS=1`` it does the same under tf-keras.
"""

import json
import os
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import horovod.tensorflow as hvd
import horovod.tensorflow.keras as horovod_keras
import numpy as np
import tensorflow as tf

import lms.hvd as glue
from lms.errors import LMSError

keras = tf.keras
KERAS_3 = hasattr(keras, "ops")
found: dict[str, object] = {"keras": keras.Model.__module__.partition(".")[0], "keras 3": KERAS_3}


def data(rank: "int | None" = None) -> "tuple[np.ndarray, np.ndarray]":
    """Each rank has its own."""
    rng = np.random.default_rng(hvd.rank() if rank is None else rank)
    return rng.normal(size=(32, 8)).astype("float32"), rng.normal(size=(32, 1)).astype("float32")


def build(seed: int) -> Any:
    keras.utils.set_random_seed(seed)
    return keras.Sequential([keras.Input((8,)), keras.layers.Dense(4), keras.layers.Dense(1)])


def in_sync(variables: object) -> str:
    try:
        glue.check_in_sync(variables)
    except glue.OutOfSyncError as error:
        return str(error)
    return "in sync"


def compare_optimizers() -> None:
    """The same start, different data: who still agrees after eight steps, and with whom?"""
    x, y = data()
    makers = {"horovods": horovod_keras.DistributedOptimizer, "ours": glue.DistributedOptimizer}
    for name, distribute in makers.items():
        model = build(7)
        model.compile(distribute(keras.optimizers.SGD(0.1)), "mse")
        model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
        found[name] = in_sync(model.trainable_variables)
    found["as one process"] = bool(np.allclose(model.get_weights()[0], alone(), atol=1e-6))


def alone() -> np.ndarray:
    """The same steps in one process: the mean of the ranks' gradients is that of their batches together."""
    model = build(7)
    model.compile(keras.optimizers.SGD(0.1), "mse")
    both = [np.stack(part, 1) for part in zip(data(0), data(1), strict=True)]  # batches of 8 pairs, in order
    x, y = (part.reshape(64, -1) for part in both)
    model.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0)
    weights: np.ndarray = model.get_weights()[0]
    return weights


def broadcast_and_average() -> None:
    """Different starts become one; metrics become one; the saved optimizer is a plain one."""
    x, y = data()
    model = build(100 + hvd.rank())
    found["before broadcast"] = in_sync(model.trainable_variables)
    model.compile(glue.DistributedOptimizer(keras.optimizers.Adam(0.01)), "mse")
    callbacks = [glue.BroadcastVariables(), glue.MetricAverage()]
    history = model.fit(x, y, batch_size=8, epochs=2, verbose=0, callbacks=callbacks)
    found["after broadcast"] = in_sync(model)
    losses = hvd.allgather_object(history.history["loss"])
    found["metrics agree"] = losses[0] == losses[1]
    if hvd.rank() == 0:
        path = os.path.join(tempfile.mkdtemp(), "model.keras")
        model.save(path)
        loaded = keras.models.load_model(path)
        found["loaded as"] = type(loaded).__module__.partition(".")[0]
        found["loaded optimizer"] = [
            type(loaded.optimizer).__name__,
            hasattr(loaded.optimizer, "lms_distributed"),
        ]
        found["same predictions"] = bool(
            np.array_equal(loaded.predict(x, verbose=0), model.predict(x, verbose=0))
        )


def late_build() -> None:
    """A model without input shape is built by its first batch; embeddings give sparse gradients."""
    keras.utils.set_random_seed(hvd.rank())
    model = keras.Sequential(
        [keras.layers.Embedding(10, 4), keras.layers.GlobalAveragePooling1D(), keras.layers.Dense(1)]
    )
    rng = np.random.default_rng(hvd.rank())
    words, labels = rng.integers(0, 10, (16, 3)), rng.normal(size=(16, 1)).astype("float32")
    model.compile(glue.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    model.fit(words, labels, batch_size=8, epochs=2, verbose=0, callbacks=[glue.BroadcastVariables()])
    found["late build, sparse gradients"] = in_sync(model)


def gradients() -> None:
    """None stays None, sparse and dense gradients get their mean, in half precision if asked for."""
    rank = float(hvd.rank())
    sparse = tf.IndexedSlices(tf.constant([[rank]]), tf.constant([hvd.rank()]), tf.constant([2, 1]))
    options = {"op": hvd.Average, "compression": hvd.Compression.fp16}
    names = ["a", "b", "c"]
    nothing, dense, slices = glue.reduce_gradients([None, tf.constant([rank, 4.0]), sparse], names, **options)
    found["reduced"] = [nothing, dense.numpy().tolist(), tf.convert_to_tensor(slices).numpy().tolist()]
    (dense,) = glue.reduce_gradients([sparse], ["d"], sparse_as_dense=True, **options)
    found["sparse as dense"] = dense.numpy().tolist()


def custom_loop() -> None:
    """Eager and traced steps without ``fit``."""
    x, y = data()
    model = build(7)
    optimizer = glue.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9))

    def step() -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - y) ** 2)
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

    step()
    tf.function(step)()
    found["custom loop"] = in_sync(
        [*model.trainable_variables, *glue._optimizer_variables(Holder(optimizer))]
    )


class Holder:
    """A model as far as its optimizer goes."""

    def __init__(self, optimizer: object) -> None:
        self.optimizer = optimizer


def refusals() -> None:
    """Mistakes end in one clear line on every rank instead of a hang."""
    optimizer = keras.optimizers.SGD(0.1)
    glue.DistributedOptimizer(optimizer)
    found["twice"] = refused(lambda: glue.DistributedOptimizer(optimizer))
    found["no optimizer"] = refused(lambda: glue.DistributedOptimizer(object()))
    found["session's"] = type(glue.DistributedOptimizer(tf.compat.v1.train.AdamOptimizer())).__module__
    sizes = [tf.Variable(0.0)] * (1 + hvd.rank())
    found["other variables"] = refused(lambda: glue.broadcast_variables(sizes))
    found["other order"] = refused(lambda: glue.check_in_sync([tf.Variable(tf.zeros(1 + hvd.rank()))]))
    if KERAS_3:
        keras.mixed_precision.set_global_policy("mixed_float16")
        model = build(7)
        model.compile(glue.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
        found["scaled outside"] = refused(
            lambda: model.fit(*data(), verbose=0, callbacks=[glue.BroadcastVariables()])
        )
        model = build(7)
        scaled = keras.mixed_precision.LossScaleOptimizer(keras.optimizers.SGD(0.1))
        model.compile(glue.DistributedOptimizer(scaled), "mse", jit_compile=True)
        model.fit(*data(), verbose=0, callbacks=[glue.BroadcastVariables()])
        found["scaled inside"] = in_sync(model)


def refused(action: Callable[[], object]) -> str:
    try:
        action()
    except LMSError as error:
        return str(error)
    return "done"


found["without init"] = refused(lambda: glue.DistributedOptimizer(keras.optimizers.SGD(0.1)))
hvd.init()
compare_optimizers()
broadcast_and_average()
late_build()
gradients()
custom_loop()
refusals()
if hvd.rank() == 0:
    json.dump(found, sys.stdout)
