"""Trains with and without optimizer state and weights on the host; prints what each ended in as JSON.

    python tests/lms/bits/host_state_job.py 3 adam adamw        # small networks, each optimizer in turn
    python tests/lms/bits/host_state_job.py 3 transformer host  # one mode, for a process with a hard limit

``state`` is ``optimizer_state="host"``, ``host`` is that and ``variables="host"``, ``auto`` leaves both open.
"""

import hashlib
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("TF_CPU_ALLOCATOR_USE_BFC", "true")  # it alone counts what a CPU device holds
if sys.argv[1] == "2":
    os.environ["TF_USE_LEGACY_KERAS"] = "1"

import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

import lms  # noqa: E402

keras = tf.keras
DEVICE = "GPU:0" if tf.config.list_physical_devices("GPU") else "CPU:0"
MODES = {
    "plain": None,
    "state": {"policy": "auto", "optimizer_state": "host"},
    "host": {"policy": "all", "optimizer_state": "host", "variables": "host"},
    "auto": {"policy": "auto"},
}
OPTIMIZERS = {
    "adam": lambda: keras.optimizers.Adam(),
    "adamw": lambda: keras.optimizers.AdamW(weight_decay=0.01),
    "momentum": lambda: keras.optimizers.SGD(0.01, momentum=0.9),
    "clipped": lambda: keras.optimizers.Adam(global_clipnorm=0.1),
    "averaged": lambda: keras.optimizers.Adam(use_ema=True, ema_momentum=0.9),
    "accumulated": lambda: keras.optimizers.Adam(gradient_accumulation_steps=2),
    "scaled": lambda: keras.mixed_precision.LossScaleOptimizer(keras.optimizers.Adam()),
    "v1_adam": lambda: tf.compat.v1.train.AdamOptimizer(),
    "v1_momentum": lambda: tf.compat.v1.train.MomentumOptimizer(0.01, 0.9),
}

DATA = np.random.RandomState(0).randn(48, 128).astype("f")
TOKENS = np.random.RandomState(0).randint(0, 64, (4, 17))


def network() -> Any:
    given = keras.Input((128,))
    hidden = keras.layers.Dense(128, activation="gelu", kernel_regularizer="l2")(given)
    hidden = keras.layers.Dropout(0.1)(keras.layers.LayerNormalization()(hidden))
    return keras.Model(given, keras.layers.Dense(128)(keras.layers.Dense(128, activation="relu")(hidden)))


def transformer(width: int = 256, layers: int = 6) -> Any:
    given = keras.Input((16,), dtype="int32")
    x = keras.layers.Embedding(64, width)(given)
    for _ in range(layers):
        y = keras.layers.LayerNormalization()(x)
        x = x + keras.layers.MultiHeadAttention(4, width // 4)(y, y, use_causal_mask=True)
        y = keras.layers.Dense(4 * width, activation="gelu")(keras.layers.LayerNormalization()(x))
        x = x + keras.layers.Dropout(0.1)(keras.layers.Dense(width)(y))
    return keras.Model(given, keras.layers.Dense(64)(x))


def train(name: str) -> tuple[Any, Any]:
    """Train a new model."""
    if name == "transformer":
        model = transformer()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss, jit_compile=False)
        model.fit(TOKENS[:, :-1], TOKENS[:, 1:], batch_size=2, epochs=2, verbose=0)
        return model, model.optimizer
    model, optimizer = network(), OPTIMIZERS[name]()
    if not name.startswith("v1"):
        model.compile(optimizer, "mse", jit_compile=False)
        data = DATA.copy()
        if name == "scaled":
            data[20] *= 1e30  # two of the six steps have gradients that are not finite, and update nothing
        model.fit(data, data, batch_size=16, epochs=2, verbose=0)
        return model, optimizer

    @tf.function
    def step(batch: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(batch, training=True) - batch) ** 2)
        found = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(found, model.trainable_variables, strict=True))
        return loss

    for start in range(0, 48, 16):
        step(tf.constant(DATA[start : start + 16]))
    return model, optimizer


def main() -> None:
    names = [name for name in sys.argv[2:] if name not in MODES]
    all_found = {}
    for name in names:
        found = all_found[name] = {}
        for mode in [mode for mode in sys.argv[2:] if mode in MODES] or ("plain", "state", "host"):
            config = MODES[mode]
            if config is not None:
                if name == "transformer":
                    config = {**config, "policy": "auto"}
                lms.enable(min_tensor_bytes=4096, **config)
            keras.backend.clear_session()  # v1 optimizers sort what they have by name
            keras.utils.set_random_seed(1)
            model, optimizer = train(name)
            kept = optimizer.variables() if callable(optimizer.variables) else optimizer.variables
            digest, nbytes = hashlib.sha256(), 0
            for variable in [*model.variables, *kept]:
                value = np.asarray(variable)
                digest.update(value.tobytes())
                nbytes += value.nbytes
            seen = {"digest": digest.hexdigest(), "bytes": nbytes}
            memory = tf.config.experimental.get_memory_info(DEVICE)
            if config is not None:
                seen.update(report_of(), left_bytes=memory["current"], peak_bytes=memory["peak"])
                seen["saved"] = saves_and_loads(model)
                lms.disable()
            found[mode] = seen
    print(json.dumps(all_found))


def report_of() -> dict[str, Any]:
    report = lms.report()
    (graph,) = report.edited[-1:]
    return {
        "state": graph.streamed.state,
        "weights": graph.streamed.weights,
        "copies_out": [graph.copies_out, graph.executed],
        "planned_peak_bytes": report.planned_peak_bytes,
        "warnings": list(report.warnings),
    }


def saves_and_loads(model: Any) -> bool:
    """Tell whether weights come back as they were, from a file and a checkpoint, and not to the device."""
    before = [value.copy() for value in model.get_weights()]
    in_use = tf.config.experimental.get_memory_info(DEVICE)["current"]
    with tempfile.TemporaryDirectory() as folder:
        model.save_weights(str(Path(folder) / "one.weights.h5"))
        loads = [lambda: model.load_weights(str(Path(folder) / "one.weights.h5"))]
        limits = {"TF_CPU_BFC_MEM_LIMIT_IN_MB", "SIMGPU_MEMORY_MB"}
        if not limits & {*os.environ}:  # TensorFlow reads a whole checkpoint at once
            checkpoint = tf.train.Checkpoint(model=model)
            path = checkpoint.write(str(Path(folder) / "two"))
            loads.append(lambda: checkpoint.read(path))
        for load in loads:
            model.set_weights([np.zeros_like(value) for value in before])
            load()
            if not all(map(np.array_equal, before, model.get_weights())):
                return False
    grown = tf.config.experimental.get_memory_info(DEVICE)["current"] - in_use
    return "auto" in sys.argv or grown <= 1 << 20


if __name__ == "__main__":
    main()
