"""Compare the peak that ``lms.estimate`` forecasts with the measured one: models, batches and policies.

    python bench/fit_accuracy.py --out out/bench-fit.jsonl

Each case has a process of its own with a hard limit of the CPU device, as a training has: what another model
has left would lie between the buffers. Plans have a limit that they need. Another process forecasts the step
for all modes. The case trains ten steps of it, as many as a forecast simulates, and reads the allocator's
peak. A case that the forecast says does not fit gets a limit that is a quarter higher. Forecasts and cases
are lines of the file as soon as they are known, and what is in the file is not measured again.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

MIB = 1 << 20
WIDE_MB = 3000
"""A limit that is none."""
BATCHES = (16, 24, 32, 48, 64)
NEAR = 0.1
MODES = {
    "off": None,
    "swap": {"recompute": "off"},
    "recompute": {"recompute": "only"},
    "hybrid": {"recompute": "auto"},
}
EPOCHS = 5
"""Of two steps each."""
HIGHER = 1.25
"""The factor of the limit for cases that do not fit."""
MOST_S = 300
"""For a case."""


def plain(keras: Any) -> tuple[Any, tuple[int, ...]]:
    """Return convolutions one behind the other."""
    layers = keras.layers
    convs = [layers.Conv2D(24, 3, padding="same", activation="relu") for _ in range(8)]
    ends = [layers.GlobalAveragePooling2D(), layers.Dense(4)]
    return keras.Sequential([keras.Input((32, 32, 3)), *convs, *ends]), (32, 32, 3)


def residual(keras: Any) -> tuple[Any, tuple[int, ...]]:
    """Return residual blocks with normalization."""
    layers = keras.layers
    inputs = keras.Input((32, 32, 3))
    x = layers.Conv2D(24, 3, padding="same")(inputs)
    for _ in range(4):
        y = layers.ReLU()(layers.BatchNormalization()(x))
        x = layers.Add()([x, layers.Conv2D(24, 3, padding="same")(y)])
    return keras.Model(inputs, layers.Dense(4)(layers.GlobalAveragePooling2D()(x))), (32, 32, 3)


def dense(keras: Any) -> tuple[Any, tuple[int, ...]]:
    """Return a perceptron with dropout, of more variables than the others."""
    layers = keras.layers
    body = []
    for _ in range(6):
        body += [layers.Dense(512, activation="gelu"), layers.Dropout(0.1, seed=1)]
    return keras.Sequential([keras.Input((128, 64)), *body, layers.Flatten(), layers.Dense(4)]), (128, 64)


def attention(keras: Any) -> tuple[Any, tuple[int, ...]]:
    """Return a small transformer."""
    layers = keras.layers
    inputs = keras.Input((64, 64))
    x = inputs
    for _ in range(3):
        y = layers.LayerNormalization()(x)
        x = layers.Add()([x, layers.MultiHeadAttention(4, 16)(y, y)])
        y = layers.Dense(256, activation="gelu")(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.Dense(64)(y)])
    return keras.Model(inputs, layers.Dense(4)(layers.GlobalAveragePooling1D()(x))), (64, 64)


def unet(keras: Any) -> tuple[Any, tuple[int, ...]]:
    """Return a U-Net of three levels."""
    layers = keras.layers
    inputs = x = keras.Input((32, 32, 3))
    skips = []
    for level in range(2):
        x = layers.Conv2D(16 << level, 3, padding="same", activation="relu")(x)
        skips.append(x)
        x = layers.MaxPooling2D()(x)
    x = layers.Conv2D(64, 3, padding="same", activation="relu")(x)
    for level in (1, 0):
        x = layers.Concatenate()([layers.UpSampling2D()(x), skips[level]])
        x = layers.Conv2D(16 << level, 3, padding="same", activation="relu")(x)
    return keras.Model(inputs, layers.Dense(4)(layers.GlobalAveragePooling2D()(x))), (32, 32, 3)


MODELS = {one.__name__: one for one in (plain, residual, dense, attention, unet)}


def run_case(name: str, limit_mb: int, batch: int, mode: str) -> None:
    """Forecast a step for all modes, or train in the mode that is named; print a line of JSON."""
    import numpy as np
    import tensorflow as tf

    import lms

    lms.enable()  # before TensorFlow makes its devices, as lmsrun does: the pool is made in one piece
    tf.zeros(())
    lms.disable()
    model, shape = MODELS[name](tf.keras)
    model.compile("adam", tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    data = np.zeros((2 * batch, *shape), "f"), np.zeros((2 * batch,), "int32")
    found = trained(model, data, batch, mode) if mode else forecast(model, data, batch)
    print(json.dumps({"model": name, "batch": batch, "limit_mb": limit_mb, **found}), flush=True)


def forecast(model: Any, data: tuple[Any, Any], batch: int) -> dict[str, Any]:
    """Return the peak in bytes of a step by mode, and whether it fits."""
    import lms

    made = lms.estimate(model, *data, batch_size=batch, gpus=("here",)).to_json()["gpus"][0]["modes"]
    return {"modes": {one["mode"]: [one["peak_bytes"], one["fits"]] for one in made}}


def trained(model: Any, data: tuple[Any, Any], batch: int, mode: str) -> dict[str, Any]:
    """Train in a mode, and return the peaks in bytes: measured in the first epoch and in all, and planned."""
    import tensorflow as tf

    import lms

    case: dict[str, Any] = {"mode": mode}
    peaks: list[int] = []

    class Peaks(tf.keras.callbacks.Callback):  # type: ignore[misc]
        """Notes the peak so far after each epoch."""

        def on_epoch_end(self, *_: Any) -> None:
            peaks.append(tf.config.experimental.get_memory_info("CPU:0")["peak"])

    if settings := MODES[mode]:
        lms.enable(policy="auto", **settings)
    tf.config.experimental.reset_memory_stats("CPU:0")
    try:
        options = {"batch_size": batch, "verbose": 0, "shuffle": False}
        model.fit(*data, epochs=EPOCHS, callbacks=[Peaks()], **options)
        case |= {"first_bytes": peaks[0], "measured_bytes": peaks[-1]}
    except tf.errors.ResourceExhaustedError:
        case["ended"] = "out of memory"
    if settings:
        step = max(lms.report().graphs, key=lambda one: one.ops, default=None)
        case["edited"] = bool(step and step.edited)
        case["planned_bytes"] = step and step.planned_peak_bytes
    return case


def child(name: str, limit_mb: int, batch: int, mode: str = "") -> dict[str, Any]:
    """Forecast a step, or train in a mode, under a limit and in a process of its own."""
    limits = {"TF_CPU_ALLOCATOR_USE_BFC": "true", "TF_CPU_BFC_MEM_LIMIT_IN_MB": str(limit_mb)}
    command = [sys.executable, __file__, "--case", json.dumps([name, limit_mb, batch, mode])]
    environ = {**os.environ, **limits, "TF_CPP_MIN_LOG_LEVEL": "3"}
    case: dict[str, Any] = {"model": name, "batch": batch, "mode": mode, "limit_mb": limit_mb}
    try:
        done = subprocess.run(
            command, env=environ, stdout=subprocess.PIPE, text=True, timeout=MOST_S, check=False
        )
    except subprocess.TimeoutExpired:
        return case | {"ended": f"no end after {MOST_S} s"}
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return json.loads(lines[-1]) if lines else case | {"ended": f"exit code {done.returncode}"}


class Book:
    """The cases that are measured, in a file.

    Args:
        path: Of the file; a line of JSON a case or a forecast.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.cases: dict[tuple[str, int, str], dict[str, Any]] = {}
        self._forecasts: dict[tuple[str, int, int], dict[str, Any]] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                self._note(json.loads(line))

    def _note(self, found: dict[str, Any]) -> None:
        if found.get("mode"):
            self.cases[found["model"], found["batch"], found["mode"]] = found
        else:
            self._forecasts[found["model"], found["batch"], found["limit_mb"]] = found

    def _write(self, found: dict[str, Any]) -> None:
        self._note(found)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(found) + "\n")
        print(json.dumps(found), flush=True)

    def forecast(self, name: str, batch: int, limit_mb: int) -> dict[str, Any]:
        """Return the peak in bytes of each mode and whether it fits, or nothing where that is not known."""
        if (name, batch, limit_mb) not in self._forecasts:
            self._write(child(name, limit_mb, batch))
        modes: dict[str, Any] = self._forecasts[name, batch, limit_mb].get("modes", {})
        return modes

    def measure(self, name: str, limit_mb: int, cases: Iterable[tuple[int, str]]) -> None:
        """Measure cases of a model, by batch and mode, under a limit or else a higher one."""
        left = [(batch, mode) for batch, mode in cases if (name, batch, mode) not in self.cases]
        while left:
            higher: list[tuple[int, str]] = []
            for batch, mode in left:
                forecast_bytes, fits = self.forecast(name, batch, limit_mb).get(mode, (None, True))
                if not fits:
                    higher.append((batch, mode))
                    continue
                known = {} if forecast_bytes is None else {"forecast_bytes": forecast_bytes}
                case = child(name, limit_mb, batch, mode) if known else {"ended": "not forecast"}
                self._write({"model": name, "batch": batch, "mode": mode, **case, **known})
            left = higher
            limit_mb = int(limit_mb * HIGHER) + 1


def main(argv: list[str]) -> int:
    """Run all cases that are not in the file, and print what they give."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--models", default=",".join(MODELS), help="names of models, between commas")
    parser.add_argument("--out", type=Path, default=ROOT / "out/bench-fit.jsonl", help="the file of cases")
    given = parser.parse_args(argv)
    if given.case:
        run_case(*json.loads(given.case))
        return 0
    book = Book(given.out)
    names, limits = given.models.split(","), {}
    for name in names:
        book.measure(name, WIDE_MB, [(batch, "off") for batch in BATCHES])
        plain = (book.cases[name, batch, "off"].get("forecast_bytes") for batch in BATCHES)
        if not (alone := sorted(filter(None, plain))):
            sys.exit(f"no case of {name} gave a result")
        limits[name] = max(16, int(alone[len(alone) // 2] / MIB * 0.8))
    for batch in BATCHES:
        for name in names:
            book.measure(name, limits[name], [(batch, mode) for mode in MODES if mode != "off"])
    print("\n".join(table(book.cases.values())))
    return 0


def table(cases: Iterable[dict[str, Any]]) -> Iterator[str]:
    """Yield a table of the errors by mode, and the cases that are not near."""
    rows: dict[str, list[float | None]] = {}
    for case in cases:
        is_measured = "measured_bytes" in case
        error = case["forecast_bytes"] / case["measured_bytes"] - 1 if is_measured else None
        for row in (case["mode"], "all"):
            rows.setdefault(row, []).append(error)
        if error is None or abs(error) > NEAR:
            why = case.get("ended", "not run") if error is None else f"{error:+.1%}"
            yield f"{case['model']}, {case['batch']} examples, {case['mode']}: {why}"
    yield "| mode | cases | within 10% | largest error |"
    yield "| --- | --- | --- | --- |"
    for row in (*MODES, "all"):
        errors = [error for error in rows.get(row, ()) if error is not None]
        near = sum(abs(error) <= NEAR for error in errors)
        most = max(errors, key=abs, default=0.0)
        yield f"| {row} | {len(rows.get(row, ()))} | {near} | {most:+.1%} |"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
