"""Measure steps that XLA compiles in segments between swaps, against TensorFlow's own clusters, on the CPU.

    python bench/xla.py                                  # both models; a quarter of an hour
    python bench/xla.py --models perceptron --ways clustered 60 50

Each way to run a model is a process of its own. The processes take turns step by step, so that other work on
the machine slows all of them alike; the figure is the median of the turns' ratios to the first way.

Ways: ``clustered`` is TensorFlow's auto-clustering without Large Model Support; ``compiled`` is
``jit_compile=True`` without it; ``whole`` is ``xla="auto"`` with ample memory. A number is the device's limit
in MiB, with policy ``auto`` and ``xla="auto"``; with ``-off`` behind it with ``xla="off"``.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median, quantiles
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

from lms_children import table  # noqa: E402
from lms_document import write_part  # noqa: E402

MODELS = {
    "perceptron": ("clustered", "compiled", "whole", "600", "550", "550-off", "450", "450-off"),
    "transformer": ("clustered", "compiled", "whole", "600", "560", "560-off", "500", "500-off"),
}
"""The ways in which each model is run by default."""
CLUSTERED = {"TF_XLA_FLAGS": "--tf_xla_auto_jit=2 --tf_xla_cpu_global_jit"}
AMPLE_MB = 8000
WARM = 1
"""Steps of each way that are not counted: in the first segments are compiled."""
STEPS = 2
"""Steps of each way in a turn."""


def main() -> int:
    """Train (a child), or run the benchmark."""
    options = _parse(sys.argv[1:])
    if options.child:
        train(*options.child)
        return 0
    for model in options.models:
        result = measure(model, options.ways or MODELS[model], options.turns)
        print(f"{model}\n{render(result)}\n", flush=True)
        if options.out:
            write_part(Path(options.out), f"xla-{model}", result)
    return 0


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--ways", nargs="+", help="instead of those of the models")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--out", help="file of the JSON document; it is added to")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def train(model: str, way: str) -> None:
    """Take a step whenever a line is read; print its seconds, and at the end what was seen."""
    import keras
    import tensorflow as tf

    with_lms = way not in ("clustered", "compiled")
    if with_lms:
        import lms

        lms.enable(xla="off" if way.endswith("-off") else "auto")
    else:
        tf.zeros((int(AMPLE_MB * 2**20 * 0.92) // 4,))  # takes the pool in one piece, as LMS does
    keras.utils.set_random_seed(1)
    made, batch = network(keras, model)
    optimizer = keras.optimizers.Adam() if model == "perceptron" else keras.optimizers.AdamW()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    made.compile(optimizer, loss, jit_compile=way != "clustered")

    class Clock(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            self.began = time.perf_counter()

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            print(json.dumps(time.perf_counter() - self.began), flush=True)
            self.model.stop_training = not sys.stdin.readline()

    tf.config.experimental.reset_memory_stats("CPU:0")
    made.fit(
        tf.data.Dataset.from_tensors(batch).repeat(), steps_per_epoch=10**6, verbose=0, callbacks=[Clock()]
    )
    seen = {"peak": tf.config.experimental.get_memory_info("CPU:0")["peak"]}
    if with_lms:
        step = lms.report().graphs[-1]
        seen |= {"planned": step.planned_peak_bytes, "retries": lms.report().retries}
        seen |= {"tensors": step.tensors, "bytes_out": step.bytes_out, "segments": step.segments}
    print(json.dumps(seen))


def network(keras: Any, model: str) -> tuple[Any, tuple[Any, Any]]:
    """Return a model and a batch of rows and labels."""
    import numpy as np

    layers, random = keras.layers, np.random.default_rng(0)
    if model == "perceptron":
        inputs = x = keras.Input((512,))
        for _ in range(8):
            x = layers.Dense(512, activation="gelu")(x)
        rows = random.random((8192, 512), dtype="float32")
        return keras.Model(inputs, layers.Dense(10)(x)), (rows, random.integers(0, 10, 8192))
    inputs = x = keras.Input((128, 128))
    for _ in range(2):
        y = layers.LayerNormalization()(x)
        x = layers.Add()([x, layers.MultiHeadAttention(4, 32)(y, y)])
        y = layers.LayerNormalization()(x)
        x = layers.Add()([x, layers.Dense(128)(layers.Dense(512, activation="gelu")(y))])
    rows = random.random((128, 128, 128), dtype="float32")
    return keras.Model(inputs, layers.Dense(10)(x)), (rows, random.integers(0, 10, (128, 128)))


class Child:
    """A process that takes a step when told to."""

    def __init__(self, model: str, way: str) -> None:
        environ = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "TF_USE_LEGACY_KERAS": "0"}
        limit = way.removesuffix("-off")
        environ["TF_CPU_ALLOCATOR_USE_BFC"] = "true"
        environ["TF_CPU_BFC_MEM_LIMIT_IN_MB"] = limit if limit.isdecimal() else str(AMPLE_MB)
        environ |= CLUSTERED if way == "clustered" else {}
        argv = [sys.executable, __file__, "--child", model, way]
        self._process = subprocess.Popen(
            argv, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.first_s = self._read()
        for _ in range(WARM):
            self.step()

    def step(self) -> float:
        """Take a step; return its seconds."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return float(self._read())

    def close(self) -> dict[str, Any]:
        """End the process; return what it has seen."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        seen: dict[str, Any] = self._read()
        self._process.wait()
        return seen

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a way to train has ended with {self._process.wait()}")
        return json.loads(line)


def measure(model: str, ways: list[str], turns: int) -> list[dict[str, Any]]:
    """Let the ways take turns."""
    children = {way: Child(model, way) for way in ways}
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(turns):
        for way, child in children.items():
            times[way].append(median(child.step() for _ in range(STEPS)))
    first = times[ways[0]]
    return [
        {
            "way": way,
            "first_s": child.first_s,
            "step_s": median(times[way]),
            "ratios": [one / other for one, other in zip(times[way], first, strict=True)],
            **child.close(),
        }
        for way, child in children.items()
    ]


def render(results: list[dict[str, Any]]) -> str:
    """Return the table of a model."""
    rows = [
        [
            "way",
            "ratio (middle half)",
            "step, ms",
            "first, s",
            "planned",
            "peak, MiB",
            "tensors",
            "out, MiB",
            "segments",
        ]
    ]
    for one in results:
        low, middle, high = quantiles(one["ratios"], n=4)
        swapped = f"{one['bytes_out'] / 2**20:.0f}" if "bytes_out" in one else ""
        cells = [one["way"], f"{middle:.2f} ({low:.2f} to {high:.2f})", f"{one['step_s'] * 1000:.0f}"]
        planned = f"{one['planned'] / 2**20:.0f}" if one.get("planned") else ""
        cells += [f"{one['first_s']:.0f}", planned, f"{one['peak'] / 2**20:.0f}"]
        rows.append([*cells, str(one.get("tensors", "")), swapped, str(one.get("segments", ""))])
    return table(rows)


if __name__ == "__main__":
    sys.exit(main())
