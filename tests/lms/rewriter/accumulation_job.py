"""Trains with accumulated gradients and momenta; prints what it found as JSON.

python accumulation_job.py off|auto
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
BATCH, WIDTH, LAYERS, STEPS = 768, 384, 8, 6

if sys.argv[1] != "off":
    lms.enable(policy=sys.argv[1])
keras.utils.set_random_seed(7)
x = given = keras.Input((64,))
for _ in range(LAYERS):
    x = keras.layers.Dense(WIDTH, activation="gelu")(x)
model = keras.Model(given, keras.layers.Dense(10)(x))
optimizer = keras.optimizers.SGD(0.01, momentum=0.9, gradient_accumulation_steps=3)
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(optimizer, loss, jit_compile=False)
random = np.random.default_rng(0)
rows = random.standard_normal((STEPS * BATCH, 64), dtype="f")
labels = random.integers(0, 10, STEPS * BATCH)
data = tf.data.Dataset.from_tensor_slices((rows, labels)).batch(BATCH, drop_remainder=True)
model.fit(data, epochs=2, verbose=0)
digest = hashlib.sha256()
for variable in [*model.variables, *optimizer.variables]:
    digest.update(np.asarray(variable).tobytes())
found: dict[str, Any] = {"bits": digest.hexdigest()}
if sys.argv[1] != "off":
    report = lms.report()
    (graph,) = report.edited
    found["ops"], found["warnings"] = graph.ops, list(report.warnings)
print(json.dumps(found))
