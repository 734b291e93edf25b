"""Trains two large layers with Adam, or has them forecast for the device at hand; prints JSON.

python large_variables_job.py fit|run
"""

import json
import os
import sys
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["TF_CPU_ALLOCATOR_USE_BFC"] = "true"

import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

import lms  # noqa: E402

(mode,) = sys.argv[1:]
WIDTH, LAYERS, BATCH, STEPS = 1024, 2, 64, 8
if mode == "run":
    lms.enable()
tf.keras.utils.set_random_seed(1)
layers = [tf.keras.layers.Dense(WIDTH, activation="relu") for _ in range(LAYERS)]
model = tf.keras.Sequential([tf.keras.Input((WIDTH,)), *layers])
model.compile("adam", "mse")
data = np.random.default_rng(0).random((BATCH * STEPS, WIDTH), "f")
found: dict[str, Any]
if mode == "fit":
    (gpu,) = lms.estimate(model, data, data, batch_size=BATCH, gpus=("here",)).to_json()["gpus"]
    found = {one["mode"]: one for one in gpu["modes"]}
else:
    model.fit(data, data, batch_size=BATCH, verbose=0)
    report = lms.report()
    found = {"planned": report.planned_peak_bytes, "measured": report.measured_peak_bytes}
    found["moved"] = max((one.streamed.nbytes for one in report.edited), default=0)
print(json.dumps(found))
