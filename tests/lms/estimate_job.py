"""Forecasts a Keras model and a loop of its own, and checks that no step has run; prints JSON."""

import gc
import json
import os
import pickle
from typing import Any

os.environ["LMS_REPORT_DIR"] = "/nowhere"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

import lms  # noqa: E402
from lms.engine import engine, tracing  # noqa: E402
from lms.estimates import estimating  # noqa: E402
from lms.ir.graph import GraphError  # noqa: E402

traces: list[int] = []


class Counted(tf.keras.layers.Dense):  # type: ignore[misc]
    """Notes each trace of its call."""

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        """Note the trace, and do the same as ever."""
        traces.append(1)
        return super().call(inputs)


layers = [Counted(64, activation="relu"), *(tf.keras.layers.Dense(64, activation="relu") for _ in range(5))]
model = tf.keras.Sequential([tf.keras.Input((64,)), *layers])
model.compile("adam", "mse")
data = np.ones((96, 64), "f")
before = model.get_weights()
traces.clear()
found = {"fit": lms.estimate(model, data, data, batch_size=32, gpus=("V100-16", "H100")).to_json()}
found["traces"], found["keras 3"] = len(traces), hasattr(tf.keras, "ops")
optimizer = tf.keras.optimizers.Adam()
optimizer.build(model.trainable_variables)


@tf.function
def step(batch: tf.Tensor) -> tf.Tensor:
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(batch) - batch) ** 2)
    slopes = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(slopes, model.trainable_variables, strict=True))
    return loss


printed = lms.estimate(step, tf.ones((32, 64)))
try:
    estimating.estimate_step("step", printed.step, ["here"])
except lms.LMSError as error:
    found["unknown"] = str(error)
found["loop"] = printed.to_json()
found["pickled"] = len(pickle.dumps(printed))
found["text"] = str(printed)
found["unchanged"] = all(map(np.array_equal, before, model.get_weights()))
found["steps"] = int(optimizer.iterations), int(model.optimizer.iterations)
step(tf.ones((32, 64)))
Forecaster, built = estimating.Forecaster, []


def count(*given: Any) -> Any:
    """Note that a forecaster is built."""
    built.append(1)
    return Forecaster(*given)


estimating.Forecaster = count
gc.collect()
lying = tf.config.experimental.get_memory_info("CPU:0")["current"]
gc.disable()
found["here"] = lms.estimate(model, data, data, batch_size=32, gpus=("here",)).to_json()["gpus"][0]
gc.enable()
found["left"] = tf.config.experimental.get_memory_info("CPU:0")["current"] - lying
found["built"] = len(built)
tf.zeros((200 << 18,))  # the pool in one piece
tf.config.experimental.reset_memory_stats("CPU:0")
model.fit(data, data, batch_size=32, epochs=4, verbose=0)  # 12 steps: a forecast's peak is that of ten
found["measured"] = tf.config.experimental.get_memory_info("CPU:0")["peak"]
found["later"] = int(optimizer.iterations), int(model.optimizer.iterations)
for wrong in ({"gpus": ("H1000",)}, {"call": lambda: None}):
    try:
        lms.estimate(wrong.pop("call", step), *([tf.ones((32, 64))] if wrong else []), **wrong)
    except lms.LMSError as error:
        found.setdefault("refused", []).append(str(error))


def refuse(*_: object) -> None:
    raise GraphError("no such order")


tracing.stream_variables = refuse
kept = lms.estimate(tf.function(step.python_function), tf.ones((32, 64))).to_json()["gpus"][0]["modes"]
found["kept"] = [one | {"mode": ""} for one in kept if one["mode"] in ("hybrid", "host state")]


def fail(*_: object) -> None:
    raise ZeroDivisionError("no such size")


engine.trace = fail
steps = int(optimizer.iterations)
try:
    lms.estimate(tf.function(step.python_function), tf.ones((32, 64)))
except lms.LMSError as error:
    found["refused"].append(str(error))
found["handed_on"] = "LMS_REPORT_DIR" in os.environ
found["ran"] = int(optimizer.iterations) - steps
print(json.dumps(found))
