"""Trains on two stand-in GPUs, whose gradients meet behind the backward pass; prints what it found as JSON.

    python piled_job.py mirrored|ranks MIB POLICY [adam]

``mirrored`` trains on both devices of a process, ``ranks`` is one of two Horovod ranks. Each device has so
many MiB; with the policy ``off`` there is no Large Model Support. Variables lie on the host if there is no
room for their gradients otherwise; the state of Adam does in any case.
"""

import hashlib
import json
import sys
from typing import Any

import numpy as np
import tensorflow as tf

import lms

way, mib, policy = sys.argv[1], int(sys.argv[2]), sys.argv[3]
name = sys.argv[4] if len(sys.argv) > 4 else "sgd"
keras, memory = tf.keras, tf.config.experimental
WIDTH, LAYERS, BATCH, STEPS = 512, 10, 32, 4

for gpu in tf.config.list_physical_devices("GPU"):
    tf.config.set_logical_device_configuration(gpu, [tf.config.LogicalDeviceConfiguration(mib)])
if policy != "off":
    state = "host" if name == "adam" else "auto"
    lms.enable(enabled=True, policy=policy, min_tensor_bytes=4096, optimizer_state=state)
keras.utils.set_random_seed(1)
rows = np.random.default_rng(0).random((BATCH, WIDTH), dtype="f")
labels = np.arange(BATCH) % 10
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def network() -> Any:
    """Dense layers with few rows: the gradients take more memory than all else."""
    x = inputs = keras.Input((WIDTH,))
    for _ in range(LAYERS):
        x = keras.layers.Dense(WIDTH, activation="relu")(x)
    return keras.Model(inputs, keras.layers.Dense(10)(x))


def mirrored() -> Any:
    """Train on both devices; the sums of the gradients are made on the first one."""
    reduction = tf.distribute.ReductionToOneDevice()
    with tf.distribute.MirroredStrategy(["GPU:0", "GPU:1"], cross_device_ops=reduction).scope():
        model = network()
        model.compile(name, loss, jit_compile=False)
    memory.reset_memory_stats("GPU:0")
    model.fit(tf.data.Dataset.from_tensors((rows, labels)).repeat(STEPS), verbose=0)
    return model


def ranks() -> Any:
    """Train as one of two ranks."""
    import horovod.tensorflow as hvd

    hvd.init()
    with tf.device("GPU:0"):
        model = network()
        optimizer = keras.optimizers.get(name)
        optimizer.build(model.trainable_variables)
        memory.reset_memory_stats("GPU:0")

        @tf.function
        def step(rows: Any, labels: Any) -> Any:
            with tf.GradientTape() as tape:
                value = loss(labels, model(rows, training=True))
            slopes = [hvd.allreduce(one) for one in tape.gradient(value, model.trainable_variables)]
            optimizer.apply_gradients(zip(slopes, model.trainable_variables, strict=True))
            return value

        for _ in range(STEPS):
            step(tf.constant(rows), tf.constant(labels))
    return model


trained = {"mirrored": mirrored, "ranks": ranks}[way]()
found = {"peak": memory.get_memory_info("GPU:0")["peak"]}
if policy != "off":
    first = lms.report().graphs[0]
    found |= {"planned": lms.report().planned_peak_bytes, "retries": lms.report().retries}
    found |= {"before": first.peak_before_bytes, "edited": first.edited}
    found |= {"on_host": first.streamed.weights, "warnings": lms.report().warnings}
    found |= {"state": [one.streamed.state for one in lms.report().graphs]}
bits = hashlib.sha256(b"".join(np.asarray(one).tobytes() for one in trained.get_weights())).hexdigest()
print(json.dumps(found | {"bits": bits[:16]}), flush=True)
