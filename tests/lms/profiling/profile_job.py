"""Profiles a training step: python profile_job.py MODEL-OR-SMALL; what it found, as JSON."""

import json
import os
import sys
import time
from pathlib import Path

import numpy as np
import tensorflow as tf

import lms

SIZE, LAYERS, BATCH = 256, 8, 512


def make_step():
    tf.keras.utils.set_random_seed(0)
    weights = [tf.Variable(tf.random.normal((SIZE, SIZE), stddev=0.05, seed=n)) for n in range(LAYERS)]

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            y = x
            for weight in weights:
                y = tf.nn.dropout(tf.nn.relu(tf.matmul(y, weight)), 0.1)
            loss = tf.reduce_sum(y)
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(1e-3 * gradient)
        return loss

    return step


def keras_steps(count):
    tf.keras.utils.set_random_seed(0)
    layers = [tf.keras.layers.Dense(SIZE, activation="relu") for _ in range(LAYERS)]
    model = tf.keras.Sequential([tf.keras.Input((SIZE,)), *layers])
    model.compile("sgd", "mse", jit_compile=False)
    x = np.random.default_rng(0).normal(size=(count * BATCH, SIZE)).astype("float32")
    model.fit(x, x, batch_size=BATCH, verbose=0)


def steps(step, count):
    x = tf.constant(np.random.default_rng(0).normal(size=(BATCH, SIZE)).astype("float32"))
    return [float(step(x)).hex() for _ in range(count)]


def predicted_s():
    from lms.engine.installation import engine
    from lms.simulate.step_time import clock

    planned = engine().books.collector.latest
    return clock(
        planned.plan.order, planned.plan.swaps, planned.costs, planned.costs.op_seconds(planned.graph)
    ).now_s


def profiled(step):
    with lms.profile() as measured:
        losses = steps(step, 4)
    return losses, str(measured)


def main() -> None:
    found = {"cache": os.environ["LMS_CACHE"]}
    if sys.argv[1] == "plain":
        found["losses"] = steps(make_step(), 4)
    elif sys.argv[1] == "keras":
        lms.enable(policy="all", min_tensor_bytes=4096, budget_bytes=2**40)
        with lms.profile() as measured:
            keras_steps(3)
        found["text"] = str(measured)
    elif sys.argv[1] == "cross":
        lms.enable(policy="all", min_tensor_bytes=4096, budget_bytes=2**40)
        one, other = make_step(), make_step()
        steps(one, 2)
        found["texts"] = []
        for step in (one, other, one):
            try:
                found["texts"].append(profiled(step)[1])
            except lms.LMSError as error:
                found["texts"].append(str(error))
    elif sys.argv[1] == "refused":

        def on():
            lms.enable(min_tensor_bytes=4096)

        def unwritable():
            lms.disable()
            os.environ["LMS_CACHE"] = "/proc/1/nowhere"
            on()

        found["began"] = []
        for name, work in (("off", lambda: None), ("nothing", on), ("unwritable", unwritable)):
            work()
            try:
                with lms.profile():
                    found["began"].append(name)
            except lms.LMSError as error:
                found[name] = str(error)
    else:
        lms.enable(policy=sys.argv[2], min_tensor_bytes=4096, budget_bytes=2**40)
        if sys.argv[1] == "profile":
            found["losses"], found["text"] = profiled(make_step())
        else:
            step = make_step()
            found["losses"] = steps(step, 4)
            began = time.perf_counter()
            steps(step, 10)
            found["measured_s"] = (time.perf_counter() - began) / 10
        report = lms.report()
        found["report"] = str(report)
        found["measured_ops"] = [graph.measured_ops for graph in report.graphs]
        found["predicted_s"] = predicted_s()
        found["warnings"] = list(report.warnings)
    folder = Path(found["cache"]) / "profiles"
    found["files"] = sorted(map(str, folder.iterdir())) if folder.exists() else []
    print(json.dumps(found))


main()
