"""Trains with variables on the host, on two stand-in GPUs; prints what it found as JSON.

    python parameters_job.py plain|state|host mirrored|second|mixed|several [POLICY RECOMPUTE]

``mirrored`` trains on both devices, ``second`` on the second alone, ``mixed`` in float16 with loss scaling,
and ``several`` takes three steps in one call.
"""

import hashlib
import json
import sys

import numpy as np
import tensorflow as tf

import lms

mode, way = sys.argv[1:3]
policy, recompute = sys.argv[3:] or ("auto", "auto")
keras = tf.keras
WIDTH, ROWS, BATCH = 512, 48, 16


def network() -> keras.Model:
    x = inputs = keras.layers.Input((WIDTH,))
    for _ in range(4):
        x = keras.layers.Dense(WIDTH, activation="gelu")(x)
    model = keras.Model(inputs, keras.layers.Dense(10)(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, jit_compile=False, steps_per_execution=3 if way == "several" else 1)
    return model


if mode != "plain":
    places = {"optimizer_state": "host", "variables": "host" if mode == "host" else "device"}
    lms.enable(min_tensor_bytes=4096, policy=policy, recompute=recompute, **places)
keras.utils.set_random_seed(1)
rows = np.random.default_rng(0).random((ROWS, WIDTH), dtype="f")
labels = np.arange(ROWS) % 10
if way == "mixed":
    keras.mixed_precision.set_global_policy("mixed_float16")
if way in ("mirrored", "mixed"):
    # The stand-in has no NCCL.
    reduction = tf.distribute.ReductionToOneDevice("CPU:0")
    scope = tf.distribute.MirroredStrategy(["GPU:0", "GPU:1"], cross_device_ops=reduction).scope()
else:
    scope = tf.device("GPU:1" if way == "second" else "GPU:0")
with scope:
    model = network()
    if way not in ("mirrored", "mixed"):
        model.fit(rows, labels, batch_size=BATCH, epochs=2, verbose=0, shuffle=False)
if way in ("mirrored", "mixed"):
    model.fit(rows, labels, batch_size=BATCH, epochs=2, verbose=0, shuffle=False)
if way == "mirrored":
    model.set_weights(model.get_weights())  # to where the values lie
left = sum(tf.config.experimental.get_memory_info(f"GPU:{number}")["current"] for number in (0, 1))
digest = hashlib.sha256()
for variable in [*model.variables, *model.optimizer.variables]:
    digest.update(np.asarray(variable).tobytes())
digest.update(model.predict(rows, verbose=0).tobytes())
told = {}
if mode != "plain":
    report = lms.report()
    told = {
        "warnings": list(report.warnings),
        "device": report.device.name,
        "peak": report.measured_peak_bytes,
    }
print(json.dumps({"bits": digest.hexdigest(), "left": left, **told}))
