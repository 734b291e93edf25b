"""Trains small networks on the stand-in GPU; prints what it found as JSON.

    python stand_in_job.py CASE

The functions below are the cases.
"""

import gc
import hashlib
import json
import os
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

import lms
from lms.device.device import read_devices
from lms.device.link_speed import costs_of_device
from lms.errors import LMSWarning
from lms.variables.memory import address_of

tf.keras.utils.set_random_seed(1)
L = tf.keras.layers
BATCH, SIZE, STEPS = 16, 16, 3


def limit(mib: int) -> None:
    """Give each GPU a hard limit."""
    for gpu in tf.config.list_physical_devices("GPU"):
        tf.config.set_logical_device_configuration(gpu, [tf.config.LogicalDeviceConfiguration(mib)])


def network(first: bool = False, blocks: int = 1) -> Any:
    """Convolutions, normalisations, residuals, a concatenation, a pool and a dropout."""
    axis = 1 if first else -1
    inputs = tf.keras.Input((3, SIZE, SIZE) if first else (SIZE, SIZE, 3))

    def convolved(x: Any, activation: str | None = None) -> Any:
        kind = "channels_first" if first else "channels_last"
        return L.Conv2D(16, 3, padding="same", activation=activation, data_format=kind)(x)

    x = convolved(inputs)
    for _ in range(blocks):
        y = L.ReLU()(L.BatchNormalization(axis=axis)(x))
        x = L.Add()([x, convolved(convolved(y, "relu"))])
    x = L.Concatenate(axis=axis)([x, L.ReLU()(x)])
    x = L.GlobalAveragePooling2D(data_format="channels_first" if first else "channels_last")(x)
    return tf.keras.Model(inputs, L.Dense(10)(L.Dropout(0.2, seed=5)(x)))


def data(first: bool = False, batch: int = BATCH) -> Any:
    """The same batches each time."""
    random = np.random.default_rng(0)
    shape = (batch * STEPS, 3, SIZE, SIZE) if first else (batch * STEPS, SIZE, SIZE, 3)
    images = random.random(shape, dtype="float32")
    labels = random.integers(0, 10, batch * STEPS).astype("int32")
    return tf.data.Dataset.from_tensor_slices((images, labels)).batch(batch, drop_remainder=True)


def trained(model: Any, batches: Any) -> dict[str, Any]:
    """Train for an epoch; the bits of all that has come of it, and the peak of the first GPU."""
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(tf.keras.optimizers.Adam(1e-3), loss, jit_compile=False)
    tf.config.experimental.reset_memory_stats("GPU:0")
    model.fit(batches, epochs=1, verbose=0, shuffle=False)
    peak = tf.config.experimental.get_memory_info("GPU:0")["peak"]
    return {"bits": bits_of([*model.variables, *model.optimizer.variables]), "peak": peak}


def bits_of(variables: Any) -> str:
    """A digest of the values."""
    return hashlib.sha256(b"".join(np.asarray(one).tobytes() for one in variables)).hexdigest()[:16]


def planned() -> dict[str, Any]:
    """What LMS reports of its latest step."""
    report = lms.report()
    latest = report.graphs[-1]
    return {
        "transport": report.transport,
        "tensors": latest.tensors,
        "recomputed": latest.recomputed.tensors if latest.recomputed else 0,
        "peak_before": latest.peak_before_bytes,
        "planned": latest.planned_peak_bytes,
        "retries": report.retries,
        "warnings": [text for text in report.warnings],
        "places": [one.place[0] for one in report.graphs if one.edited],
        "text": str(report),
    }


def with_lms(train: Callable[[], dict[str, Any]], **options: Any) -> dict[str, Any]:
    """Train once more with LMS, from the same seeds."""
    tf.keras.utils.set_random_seed(1)
    lms.enable(min_tensor_bytes=4096, **options)
    found = train()
    found |= planned()
    lms.disable()
    return found


def bits() -> Any:
    """Both layouts, with and without TensorFlow's layout optimizer: with and without LMS."""
    found = {}
    for first in (False, True):
        for turned in (True, False):
            tf.config.optimizer.set_experimental_options({"layout_optimizer": turned})
            tf.keras.utils.set_random_seed(1)

            def train(first: bool = first) -> dict[str, Any]:
                return trained(network(first), data(first))

            name = f"{'first' if first else 'last'}, {'turned' if turned else 'as it is'}"
            found[name] = train(), with_lms(train, policy="all")
    return found


def ways() -> Any:
    """Every transport, from the device."""

    def train() -> dict[str, Any]:
        return trained(network(), data())

    found = {"off": train()}
    for transport in ("auto", "host", "numpy"):
        found[transport] = with_lms(train, policy="all", transport=transport)
    found["store"] = with_lms(train, policy="all", store_dir=sys.argv[2])
    return found


def narrow() -> Any:
    """A step that needs a third more than the limit."""
    limit(int(sys.argv[2]))
    options: dict[str, Any] = {"recompute": sys.argv[3]} if len(sys.argv) > 3 else {}
    (device,) = read_devices(os.environ)
    costs_of_device(device, None)  # measures the link, by copies that are none of the training's
    began = time.monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LMSWarning)
        found = with_lms(lambda: trained(network(blocks=4), data(batch=96)), policy="auto", **options)
    return found | {"began": began}


def devices() -> Any:
    """One function that trains on both GPUs, which have limits of their own; then a mirrored strategy."""
    for gpu, mib in zip(tf.config.list_physical_devices("GPU"), (30, 60), strict=True):
        tf.config.set_logical_device_configuration(gpu, [tf.config.LogicalDeviceConfiguration(mib)])

    def both() -> dict[str, Any]:
        weights, inputs = [], []
        for number in (0, 1):
            with tf.device(f"GPU:{number}"):
                shape = (256, 256)
                values = [tf.random.stateless_normal(shape, (number, one)) * 0.05 for one in range(6)]
                weights.append([tf.Variable(value) for value in values])
                inputs.append(tf.random.stateless_normal((2048, 256), (7, number)))

        @tf.function
        def step() -> None:
            for number in (0, 1):
                with tf.device(f"GPU:{number}"):
                    with tf.GradientTape() as tape:
                        h = inputs[number]
                        for weight in weights[number]:
                            h = tf.tanh(h @ weight)
                        loss = tf.reduce_mean(h * h)
                    slopes = tape.gradient(loss, weights[number])
                    for weight, slope in zip(weights[number], slopes, strict=True):
                        weight.assign_sub(0.1 * slope)

        del values
        gc.collect()  # what the training before has left lies in cycles
        for number in (0, 1):
            tf.config.experimental.reset_memory_stats(f"GPU:{number}")
        for _ in range(3):
            step()
        peaks = [tf.config.experimental.get_memory_info(f"GPU:{number}")["peak"] for number in (0, 1)]
        return {"bits": bits_of([one for some in weights for one in some]), "peaks": peaks}

    def mirrored() -> dict[str, Any]:
        with tf.distribute.MirroredStrategy().scope():
            return trained(network(), data(batch=64))

    tf.keras.utils.set_random_seed(1)
    found = {"off": both(), "on": with_lms(both, policy="all")}
    budgets = [line.split()[1] for line in found["on"]["text"].splitlines() if "least possible" in line]
    return {**found, "budgets": budgets, "mirrored": with_lms(mirrored, policy="all")}


def retried() -> Any:
    """Kernels take scratch memory that no plan knows of: the first step runs out and is taken again."""
    limit(22)
    tf.keras.utils.set_random_seed(1)
    lms.enable(policy="auto", min_tensor_bytes=4096)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LMSWarning)
        found = trained(network(blocks=4), data(batch=96))
    return found | planned()


def plain() -> Any:
    """The same training without LMS and without a limit."""
    return trained(network(blocks=4), data(batch=96))


def pinned() -> Any:
    """A pool of pinned memory that holds less than could be swapped."""

    def train() -> dict[str, Any]:
        return trained(network(blocks=4), data(batch=144))

    tf.keras.utils.set_random_seed(1)
    return {"off": train(), "on": with_lms(train, policy="all", bandwidth_gb_s=4)}


def session() -> Any:
    """A session of TensorFlow 1, with and without LMS."""
    v1 = tf.compat.v1

    def train() -> dict[str, Any]:
        with tf.Graph().as_default(), v1.Session() as run:
            images = v1.placeholder(tf.float32, (64, 256))
            with v1.variable_scope("net", use_resource=True):
                h = images
                for number in range(6):
                    start = v1.constant_initializer(np.random.default_rng(number).random((256, 256)) / 256)
                    h = tf.tanh(h @ v1.get_variable(f"w{number}", (256, 256), initializer=start))
            loss = tf.reduce_mean(h * h)
            update = v1.train.GradientDescentOptimizer(0.1).minimize(loss)
            run.run(v1.global_variables_initializer())
            feed = {images: np.random.default_rng(9).random((64, 256), dtype="float32")}
            for _ in range(3):
                run.run(update, feed)
            return {"bits": bits_of(run.run(v1.trainable_variables()))}

    return {"off": train(), "on": with_lms(train, policy="all")}


def momenta() -> Any:
    """Where each momentum lies after each step, to which a step assigns a new value."""
    start = [np.random.default_rng(number).normal(size=(256, 256)) / 16 for number in range(4)]
    batch = tf.constant(np.random.default_rng(9).normal(size=(512, 256)), tf.float32)

    def train() -> dict[str, Any]:
        weights = [tf.Variable(one, dtype=tf.float32) for one in start]
        held = [tf.Variable(tf.zeros_like(one)) for one in weights]

        @tf.function
        def step() -> None:
            with tf.GradientTape() as tape:
                h = batch
                for weight in weights:
                    h = tf.tanh(h @ weight)
                loss = tf.reduce_mean(h * h)
            for weight, momentum, slope in zip(weights, held, tape.gradient(loss, weights), strict=True):
                momentum.assign(0.9 * momentum - 0.1 * slope)
                weight.assign_add(momentum)

        places = []
        for _ in range(5):
            step()
            places.append([address_of(one.value()) for one in held])
        return {"bits": bits_of([*weights, *held]), "addresses": places}

    return {"off": train(), "on": with_lms(train, policy="all")}


def half() -> Any:
    """Mixed precision, and memory that grows."""
    for gpu in tf.config.list_physical_devices("GPU"):
        tf.config.experimental.set_memory_growth(gpu, True)
    tf.keras.mixed_precision.set_global_policy("mixed_float16")

    def train() -> dict[str, Any]:
        return trained(network(), data())

    tf.keras.utils.set_random_seed(1)
    return {"off": train(), "on": with_lms(train, policy="all")}


def rank() -> Any:
    """A rank under lmsrun, on the device of its own."""
    found = with_lms(lambda: trained(network(), data()), policy="all")
    visible = tf.config.get_visible_devices("GPU")
    return {"device": [one.name for one in visible], "rank": os.environ["RANK"], "bits": found["bits"]}


def speeds() -> Any:
    """What plans for the device count with."""
    limit(256)
    (device,) = read_devices(os.environ)
    costs = costs_of_device(device, None)
    return [costs.flops_per_s, costs.device_bytes_per_s, costs.out_bytes_per_s, costs.in_bytes_per_s]


def profiled() -> Any:
    """A step under the profiler, which sees no kernel of the stand-in."""
    lms.enable()
    try:
        with lms.profile():
            trained(network(), data())
    except lms.LMSError as error:
        return str(error)
    return ""


CASES = {
    case.__name__: case
    for case in (
        *(bits, ways, narrow, devices, retried, plain, pinned, session, momenta, half, rank, speeds),
        profiled,
    )
}

if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    print(json.dumps(CASES[sys.argv[1]]()))
