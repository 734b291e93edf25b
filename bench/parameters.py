"""Measure steps whose variables lie on the host, on the stand-in GPU: time and peak against the plan.

    python bench/parameters.py                      # all cases
    python bench/parameters.py wide-512-60 gpt-16   # those whose names begin like this
    python bench/parameters.py --table              # only prints what is there

The device computes at a modelled speed (``SIMGPU_COMPUTE=model``): what is measured is when kernels and
copies run, not what they compute. Each case is a process of its own; its figures are written at once.
"""

import argparse
import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

import stand_in  # noqa: E402

MIB = 1 << 20
LINK_GBPS, TERAFLOPS, DEVICE_GBPS = 1.0, 0.2, 50.0
STEPS, WARM = 9, 3
WIDTH, LAYERS = 1024, 8
"""Of the wide model."""
TOKENS, WORDS = 64, 512


@dataclass(frozen=True)
class Case:
    """One training."""

    model: str
    batch: int
    limit_mib: int
    host: str = "both"
    """Which variables lie on the host: ``none``, ``state``, ``both``."""

    @property
    def link_gbps(self) -> float:
        """The speed of the link each way; slower for many small kernels, whose launches take their time."""
        return LINK_GBPS if self.model == "wide" else LINK_GBPS / 2

    @property
    def name(self) -> str:
        """Return the key under which its figures are kept."""
        return f"{self.model}-{self.batch}-{self.limit_mib}-{self.host}"


AMPLE = 2048
CASES = (
    *(Case("wide", batch, AMPLE, host) for batch in (64, 512) for host in ("none", "state", "both")),
    *(Case("wide", 64, limit) for limit in (60, 45, 38)),
    *(Case("wide", 512, limit) for limit in (100, 80, 60)),
    *(Case("gpt", batch, AMPLE, host) for batch in (4, 16) for host in ("none", "both")),
    *(Case("gpt", batch, 128) for batch in (4, 16)),
    *(Case("words", 16, limit) for limit in (AMPLE, 60)),
)


def environ(case: Case) -> dict[str, str]:
    """Return the stand-in's settings."""
    return {
        "SIMGPU_COMPUTE": "model",
        "SIMGPU_MEMORY_MB": str(AMPLE),
        "SIMGPU_TFLOPS": str(TERAFLOPS),
        "SIMGPU_MEM_GBPS": str(DEVICE_GBPS),
        "SIMGPU_D2H_GBPS": str(case.link_gbps),
        "SIMGPU_H2D_GBPS": str(case.link_gbps),
    }


def network(case: Case) -> Any:
    """Return a compiled model and a batch for it."""
    import keras
    import numpy as np

    layers, random = keras.layers, np.random.default_rng(0)
    if case.model == "wide":
        inputs = x = keras.Input((WIDTH,))
        for _ in range(LAYERS):
            x = layers.Dense(WIDTH, activation="relu")(x)
        rows = random.random((case.batch, WIDTH), dtype="float32")
        model, batch, loss = keras.Model(inputs, x), (rows, rows), "mse"
    else:
        width, depth, words = (768, 4, WORDS) if case.model == "gpt" else (256, 4, 16 * WORDS)
        inputs = keras.Input((TOKENS,), dtype="int32")
        x = layers.Embedding(words, width)(inputs)
        for _ in range(depth):
            y = layers.LayerNormalization()(x)
            x = layers.Add()([x, layers.MultiHeadAttention(8, width // 8)(y, y, use_causal_mask=True)])
            y = layers.LayerNormalization()(x)
            y = layers.Dense(width)(layers.Dense(4 * width, activation="gelu")(y))
            x = layers.Add()([x, layers.Dropout(0.1)(y)])
        model = keras.Model(inputs, layers.Dense(WORDS)(x))
        rows = random.integers(0, words, (case.batch, TOKENS))
        batch = (rows, rows % WORDS)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, jit_compile=False)
    return model, batch


def train(case: Case) -> dict[str, Any]:
    """Train; runs in a process on the stand-in."""
    import keras
    import tensorflow as tf

    gpu, *_ = tf.config.list_physical_devices("GPU")
    limit = tf.config.LogicalDeviceConfiguration(memory_limit=case.limit_mib)
    tf.config.set_logical_device_configuration(gpu, [limit])
    keras.utils.set_random_seed(1)
    import lms

    if case.host != "none":
        variables = "host" if case.host == "both" else "device"
        lms.enable(policy="auto", optimizer_state="host", variables=variables)
    model, batch = network(case)
    with tf.device("CPU:0"):
        data = tf.data.Dataset.from_tensors(tuple(map(tf.constant, batch))).repeat()

    class Clock(keras.callbacks.Callback):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.spans: list[tuple[float, float]] = []

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            if batch == WARM:
                tf.config.experimental.reset_memory_stats("GPU:0")
            self.began = time.monotonic()

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            tf.test.experimental.sync_devices()
            self.spans.append((self.began, time.monotonic()))

    clock = Clock()
    model.fit(data, epochs=1, steps_per_epoch=STEPS, verbose=0, callbacks=[clock])
    variables = [*model.variables, *model.optimizer.variables]
    found = {
        "spans": clock.spans[WARM:],
        "variables": sum(int(tf.size(one)) * 4 for one in variables),
        "peak": tf.config.experimental.get_memory_info("GPU:0")["peak"],
        "planned": 0,
        "tries": 0,
        "bytes_in": 0,
        "bytes_out": 0,
        "warnings": [],
    }
    if case.host != "none":
        report = lms.report()
        graph = report.edited[-1]
        found |= {
            "planned": report.planned_peak_bytes,
            "tries": len(report.edited) - 1,
            "bytes_in": graph.streamed.bytes_in + graph.bytes_in,
            "bytes_out": graph.streamed.bytes_out + graph.bytes_out,
            "warnings": list(report.warnings),
        }
    return found


def run(case: Case, trace: str = "") -> dict[str, Any]:
    """Run a case on the stand-in and return its figures."""
    settings = {**environ(case), **({"SIMGPU_TRACE": trace} if trace else {})}
    found = stand_in.run([__file__, "--train", json.dumps(asdict(case))], settings).found
    seconds = [end - begin for begin, end in found.pop("spans")]
    return {
        **found,
        "link": case.link_gbps * 1e9,
        "step_s": median(seconds),
        "slowest_s": max(seconds),
        "load": os.getloadavg()[0],
    }


def table(kept: dict[str, dict[str, Any]]) -> str:
    """Return the figures as a table.

    The bound is the longest of the step without a limit and without LMS, and of the copies each way.
    """
    lines = [
        "| case | variables | step | of the bound | planned | measured | off by | again | out, in | load |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, one in kept.items():
        model, batch, *_ = name.split("-")
        plain = kept.get(f"{model}-{batch}-{AMPLE}-none", {}).get("step_s", 0.0)
        bound = max(plain, one["bytes_in"] / one["link"], one["bytes_out"] / one["link"])
        off = f"{one['peak'] / one['planned'] - 1:+.1%}" if one["planned"] else ""
        lines.append(
            f"| {name} | {one['variables'] / MIB:.1f} MiB | {one['step_s'] * 1e3:.0f} ms "
            f"| {one['step_s'] / bound if bound else 1:.2f} | {one['planned'] / MIB:.1f} MiB "
            f"| {one['peak'] / MIB:.1f} MiB | {off} | {one['tries']} "
            f"| {one['bytes_out'] / MIB:.0f}, {one['bytes_in'] / MIB:.0f} MiB | {one['load']:.1f} |"
        )
    return "\n".join(lines)


def main() -> int:
    """Run the cases."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="beginnings of the names of cases")
    parser.add_argument("--out", default="out/bench-parameters.json")
    parser.add_argument("--table", action="store_true", help="only print what is there")
    parser.add_argument("--trace", default="", help="a file for what the device did")
    parser.add_argument("--train", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        print(json.dumps(train(Case(**json.loads(options.train)))))
        return 0
    out = Path(options.out)
    kept: dict[str, dict[str, Any]] = json.loads(out.read_text()) if out.exists() else {}
    for case in () if options.table else CASES:
        if not options.names or case.name.startswith(tuple(options.names)):
            try:
                kept[case.name] = run(case, options.trace)
            except RuntimeError as error:
                print(f"{case.name}: {str(error)[-3000:]}", file=sys.stderr)
                continue
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(json.dumps(kept, indent=1))
            print(table({case.name: kept[case.name]}).splitlines()[-1], flush=True)
    print(table(kept))
    return 0


if __name__ == "__main__":
    sys.exit(main())
