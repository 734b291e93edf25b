"""Trains a convolutional net from ``shuffle`` and ``prefetch`` near the device's limit; prints its plans.

The same step is planned twice: the model is compiled again with its optimizer, and the kept edit is dropped.
"""

import json
import os

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import tensorflow as tf

import lms
from lms.device.memory_pool import BATCHES, Rooms
from lms.engine import kept_edits
from lms.passes import planning

lms.enable(policy="auto")
kept_edits.KEPT_EDITS = 0
plans = []
decide = planning.decide


def noted(graph, config, kind, limit, costs):  # type: ignore[no-untyped-def]
    """Note each plan, and what the device has for it."""
    made = decide(graph, config, kind, limit, costs)
    plans.append((limit, made.plan))
    return made


planning.decide = noted
made: list[Rooms] = []
make = Rooms.make_for_batches


def kept(rooms, batches, device):  # type: ignore[no-untyped-def]
    """Note whose rooms are made."""
    make(rooms, batches, device)
    made.append(rooms)


Rooms.make_for_batches = kept  # type: ignore[method-assign]

keras, layers = tf.keras, tf.keras.layers
keras.utils.set_random_seed(1)
convolutions = [layers.Conv2D(16, 3, padding="same", activation="relu") for _ in range(8)]
model = keras.Sequential(
    [layers.Input((32, 32, 3)), *convolutions, layers.GlobalAveragePooling2D(), layers.Dense(4)]
)
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
# TensorFlow would use an array of NumPy where it lies, or copy it to the device, by its alignment.
images, labels = tf.random.stateless_uniform((256, 32, 32, 3), (1, 2)), tf.range(256) % 4
data = tf.data.Dataset.from_tensor_slices((images, labels)).shuffle(256).batch(32).prefetch(2).repeat()
optimizer = keras.optimizers.SGD(0.01)
for _ in range(2):
    model.compile(optimizer, loss, jit_compile=False)
    model.fit(data, steps_per_epoch=6, verbose=0)
print(
    json.dumps(
        {
            "limits": [limit for limit, _ in plans],
            "batches": [plan.batches for _, plan in plans],
            "swaps": [len(plan.swaps) for _, plan in plans],
            "kept_bytes": made[-1].nbytes("CPU:0", BATCHES) if made else 0,
        }
    )
)
