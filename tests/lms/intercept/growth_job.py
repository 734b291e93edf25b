"""Fits one model with batches that grow; prints the planned peaks and the warnings as JSON."""

import gc
import json
import os
import warnings
import weakref
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

import lms  # noqa: E402


def main() -> dict[str, Any]:
    """What was planned, and whether the model is there when nobody needs it any more."""
    plain, _ = train()
    lms.enable(policy="all")
    found, model = train()
    found["plain traces"] = plain["traces"]
    tf.keras.backend.clear_session()
    gc.collect()
    return {**found, "left": model() is not None}


def train() -> tuple[dict[str, Any], "weakref.ref[Any]"]:
    """Sizes of 4 and 8, validated with 64 in between, then 32."""
    traced = []

    def loss(labels: Any, made: Any) -> Any:
        traced.append(labels)
        return tf.reduce_mean((labels - made) ** 2, -1)

    keras, layers = tf.keras, tf.keras.layers
    x = inputs = layers.Input((32, 32, 3))
    for _ in range(4):
        x = layers.Conv2D(8, 3, padding="same", activation="relu")(x)
    model = keras.Model(inputs, layers.Dense(2)(layers.GlobalAveragePooling2D()(x)))
    model.compile("sgd", loss)
    images, labels = np.ones((64, 32, 32, 3), "float32"), np.zeros((64, 2), "float32")
    peaks = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for size in (4, 8, 32):
            validation = (images, labels) if size == 8 else None
            model.fit(images, labels, size, 2, 0, validation_data=validation, validation_batch_size=64)
            for graph in lms.report().edited[-1:]:
                peaks.append((graph.planned_peak_bytes or 0) - graph.base_bytes)
    said = [str(one.message) for one in caught if "planned for batches" in str(one.message)]
    return {"peaks": peaks, "said": said, "traces": len(traced)}, weakref.ref(model)


print(json.dumps(main()))
