"""Saves a model that was trained under LMS in every way that Keras has; prints what is in the files as JSON.

Run as a child process by test_saved.py. Arguments: ``keras3`` or ``tf_keras``.
"""

import json
import os
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["TF_USE_LEGACY_KERAS"] = "1" if sys.argv[1] == "tf_keras" else "0"

import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

import lms  # noqa: E402

keras = tf.keras
IMAGES = np.random.default_rng(0).random((8, 16, 16, 3), dtype=np.float32)


def build() -> Any:
    """Four convolutions, compiled."""
    inputs = x = keras.Input((16, 16, 3))
    for _ in range(4):
        x = keras.layers.Conv2D(16, 3, padding="same", activation="relu")(x)
    model = keras.Model(inputs, keras.layers.Dense(10)(keras.layers.GlobalAveragePooling2D()(x)))
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def same(model: Any, other: Any) -> bool:
    """Whether both have the same weights."""
    pairs = zip(model.get_weights(), other.get_weights(), strict=True)
    return all(np.array_equal(mine, theirs) for mine, theirs in pairs)


def main() -> dict[str, Any]:
    """Train, save, load, train on."""
    warnings.simplefilter("ignore")
    lms.enable(policy="all", min_tensor_bytes=0)
    model = build()
    model.fit(IMAGES, np.zeros(8, int), batch_size=4, verbose=0)
    seen: dict[str, Any] = {"edited": len(lms.report().edited)}
    with tempfile.TemporaryDirectory() as folder:
        for suffix in (".h5", ".keras"):
            path = f"{folder}/model{suffix}"
            model.save(path)
            loaded = keras.models.load_model(path)
            seen[suffix] = same(model, loaded)
        loaded.fit(IMAGES, np.zeros(8, int), batch_size=4, verbose=0)
        seen["trained on"] = len(lms.report().edited) > seen["edited"]
        model.save_weights(f"{folder}/model.weights.h5")
        fresh = build()
        fresh.load_weights(f"{folder}/model.weights.h5")
        seen["weights"] = same(model, fresh)
        model.export(f"{folder}/exported")
        exported = tf.saved_model.load(f"{folder}/exported")
        seen["served"] = float(np.abs(exported.serve(IMAGES) - model(IMAGES)).max())
        if sys.argv[1] == "tf_keras":
            model.save(f"{folder}/saved", save_format="tf")
        models = sorted(Path(folder).rglob("saved_model.pb"))
        seen["models"] = len(models)
        seen["with swaps"] = [path.parent.name for path in models if b"LmsSwap" in path.read_bytes()]
    return seen


if __name__ == "__main__":
    print(json.dumps(main()))
