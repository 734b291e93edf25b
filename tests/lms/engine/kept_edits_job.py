"""Compiles a model again, and makes it again, with LMS on; prints as JSON how often a plan was made."""

import gc
import json
import os
import sys
import warnings
import weakref
from collections.abc import Sequence
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["TF_CPU_ALLOCATOR_USE_BFC"] = "true"

import keras  # noqa: E402
import numpy as np  # noqa: E402
from tensorflow_large_model_support import LMS  # noqa: E402

import lms  # noqa: E402
from lms.passes import planning  # noqa: E402

RANDOM = np.random.RandomState(0)
IMAGES = RANDOM.rand(48, 24, 24, 3).astype("f")
LABELS = RANDOM.randint(0, 10, 48)


def made() -> Any:
    """A small network with normalisation."""
    keras.utils.set_random_seed(1)
    inputs = x = keras.Input((24, 24, 3))
    for _ in range(6):
        x = keras.layers.Conv2D(16, 3, padding="same")(x)
        x = keras.layers.ReLU()(keras.layers.BatchNormalization()(x))
    return keras.Model(inputs, keras.layers.Dense(10)(keras.layers.GlobalAveragePooling2D()(x)))


def train(model: Any, batch_size: int = 16, callbacks: Sequence[Any] = ()) -> list[bytes]:
    """Compile the model, with the optimizer it has, and train it; the weights."""
    optimizer = getattr(model, "optimizer", None) or "sgd"
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit(
        IMAGES, LABELS, batch_size=batch_size, epochs=1, verbose=0, shuffle=False, callbacks=[*callbacks]
    )
    return [weight.tobytes() for weight in model.get_weights()]


def main() -> None:
    """Train with LMS, counting plans, and then without."""
    warnings.simplefilter("ignore")
    model = made()
    weights = [train(model)]  # the ops of an optimizer have other names in the trace that makes its slots
    lms.enable(policy="all", min_tensor_bytes=1)
    plans, plan = [], planning.decide
    planning.decide = lambda *args: plans.append(1) or plan(*args)
    weights += [train(model), train(model)]
    found: dict[str, Any] = {"plans": [len(plans)]}
    report = lms.report()
    found["ran"] = [(stats.tensors, stats.executed) for stats in report.graphs]
    train(model, 24)
    found["plans"].append(len(plans))
    before = lms.report().store.swap_outs
    train(model, 16, [LMS(n_tensors=0, optimizer_scopes={"none"})])
    found["swapped_though_refused"] = lms.report().store.swap_outs - before
    gone = weakref.ref(model.layers[1].kernel)
    del model
    keras.backend.clear_session()
    gc.collect()
    found["freed"] = gone() is None
    lms.disable()
    model = made()
    found["same"] = weights == [train(model), train(model), train(model)]
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
