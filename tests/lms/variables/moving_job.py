"""Trains with an optimizer's state that has too little room on the device; prints what it found as JSON.

python moving_job.py off|auto

It trains with batches of two sizes, each of which has a trace of its own.
"""

import hashlib
import json
import os
import sys
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["TF_CPU_ALLOCATOR_USE_BFC"] = "true"

import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

import lms  # noqa: E402

keras = tf.keras
(mode,) = sys.argv[1:]
WIDTH, LAYERS = 512, 8
if mode != "off":
    lms.enable(policy=mode)
keras.utils.set_random_seed(1)
x = given = keras.Input((WIDTH,))
for _ in range(LAYERS):
    x = keras.layers.Dense(WIDTH, activation="relu", use_bias=False)(x)
model, optimizer = keras.Model(given, x), keras.optimizers.Adam()
random = np.random.default_rng(0)


def update(rows: Any) -> Any:
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(rows, training=True) - rows) ** 2)
    found = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(found, model.trainable_variables, strict=True))
    return loss


optimizer.build(model.trainable_variables)
step = tf.function(update)
for size in (8, 8, 512, 512, 8, 512, 8, 8, 512):
    step(tf.constant(random.random((size, WIDTH), dtype="f")))
digest = hashlib.sha256()
for variable in [*model.variables, *optimizer.variables]:
    digest.update(np.asarray(variable).tobytes())
found: dict[str, Any] = {"bits": digest.hexdigest()}
if mode != "off":
    report = lms.report()
    found["state"] = max((graph.streamed.state for graph in report.edited), default=0)
    found["retries"] = report.retries
print(json.dumps(found))
