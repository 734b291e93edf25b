"""Measure what swapping costs on the stand-in GPU: limits x links, against a bound and the timed simulator.

    python bench/gpu_standin.py                     # goes on where it stopped; ends after --minutes
    python bench/gpu_standin.py --deep              # twice as many layers of half the batch
    python bench/gpu_standin.py --table             # only prints what is there
    python bench/gpu_standin.py --retries 50        # first steps that run out of memory, tried again

The device computes at a modelled speed (``SIMGPU_COMPUTE=model``): what is measured is when kernels and
copies run, not what they compute. With ``--real`` kernels are computed as well, on a device and links ten
times slower, which a busy machine can keep up with. Each case is a process of its own; its figures are
written at once.

The network needs 254 MiB in buffers of 12 MiB, four of them at once: a quarter is little more than any plan
needs. The one of ``--deep`` needs 235 MiB in buffers of 6 MiB.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

import stand_in  # noqa: E402

MIB = 1 << 20
SHARES = (1.25, 1.5, 2.0, 4.0)
LINKS = ((0.5, 0.5), (1.0, 1.0), (2.0, 2.0), (1.0, 2.0))
"""GB/s out and in."""
TERAFLOPS, DEVICE_GBPS, LAUNCH_US = 0.1, 10.0, 5.0
SLOWER = 10.0
"""How much slower device and links are with ``--real``."""
STEPS, WARM = 7, 2
SCRATCH_MB = 24
"""Scratch memory of each convolution in a training that is to be tried again: more than the margin."""


@dataclass(frozen=True)
class Point:
    """One training."""

    policy: str
    share: float
    out_gbps: float
    in_gbps: float
    real: bool = False
    deep: bool = False
    """Whether the network has twice as many layers and half the batch."""
    retry: int = 0
    """The number of a training whose first step runs out of memory."""

    @property
    def name(self) -> str:
        """Return the key under which its figures are kept."""
        if self.retry:
            return f"retry {self.retry}"
        how = "real" if self.real else "deep" if self.deep else "model"
        return f"{how} {self.policy} 1/{self.share:g} {self.out_gbps:g} out {self.in_gbps:g} in"


def plain(real: bool, deep: bool) -> Point:
    """Return the training without LMS that others are compared with."""
    return Point("off", 1.0, 2.0, 2.0, real, deep)


def points(real: bool, deep: bool = False, retries: int = 0) -> Iterator[Point]:
    """Yield all cases; the ones without LMS come first."""
    yield plain(real, deep)
    if retries:
        yield from (Point("auto", 1.5, 2.0, 2.0, retry=number) for number in range(1, retries + 1))
        return
    if real:
        for out, back in LINKS[:3]:
            yield Point("auto", 2.0, out, back, real)
        return
    for share in SHARES:
        for out, back in LINKS:
            yield Point("auto", share, out, back, deep=deep)
    for out, back in LINKS:
        yield Point("all", 2.0, out, back, deep=deep)


def environ(point: Point) -> dict[str, str]:
    """Return the stand-in's settings for a case."""
    slower = SLOWER if point.real else 1.0
    return {
        "SIMGPU_COMPUTE": "both" if point.real else "model",
        "SIMGPU_MEMORY_MB": "2048",
        "SIMGPU_TFLOPS": str(TERAFLOPS / slower),
        "SIMGPU_MEM_GBPS": str(DEVICE_GBPS / slower),
        "SIMGPU_LAUNCH_US": str(LAUNCH_US * slower),
        "SIMGPU_D2H_GBPS": str(point.out_gbps / slower),
        "SIMGPU_H2D_GBPS": str(point.in_gbps / slower),
        "SIMGPU_SCRATCH_MB": str(SCRATCH_MB if point.retry else 0),
    }


def train(point: Point, limit_bytes: int, dump: str = "") -> dict[str, Any]:
    """Train; runs in a process on the stand-in."""
    import numpy as np
    import tensorflow as tf

    gpu, *_ = tf.config.list_physical_devices("GPU")
    if limit_bytes:
        limit = tf.config.LogicalDeviceConfiguration(memory_limit=limit_bytes / MIB)
        tf.config.set_logical_device_configuration(gpu, [limit])
    tf.keras.utils.set_random_seed(1)
    import lms

    lms.enable(policy="auto" if point.policy == "off" else point.policy)
    batch = 48 if point.real else 96 if point.deep else 192
    layers = tf.keras.layers
    inputs = tf.keras.Input((32, 32, 3))
    x = layers.Conv2D(16, 3, padding="same")(inputs)
    for _ in range(12 if point.deep else 6):
        y = layers.ReLU()(layers.BatchNormalization()(x))
        y = layers.Conv2D(16, 3, padding="same", activation="relu")(y)
        x = layers.Add()([x, layers.Conv2D(16, 3, padding="same")(y)])
    model = tf.keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling2D()(x)))
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss, jit_compile=False)
    random = np.random.default_rng(0)
    with tf.device("CPU:0"):
        images = tf.constant(random.random((batch, 32, 32, 3), dtype="float32"))
        labels = tf.constant(random.integers(0, 10, batch))
    data = tf.data.Dataset.from_tensors((images, labels)).repeat()

    class Clock(tf.keras.callbacks.Callback):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.spans: list[tuple[float, float]] = []

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            self.began = time.monotonic()

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            tf.test.experimental.sync_devices()
            self.spans.append((self.began, time.monotonic()))

    clock = Clock()
    model.fit(data, epochs=1, steps_per_epoch=STEPS, verbose=0, callbacks=[clock])
    report = lms.report()
    latest = report.graphs[-1]
    return {
        "spans": clock.spans[WARM:],
        "peak_bytes": tf.config.experimental.get_memory_info("GPU:0")["peak"],
        "planned_bytes": latest.planned_peak_bytes,
        "bytes_out": latest.bytes_out,
        "bytes_in": latest.bytes_in,
        "tensors": latest.tensors,
        "retries": report.retries,
        "notes": list(latest.notes),
        **predicted(point, dump),
    }


def predicted(point: Point, dump: str) -> dict[str, Any]:
    """Return what the timed simulator says of the planned step, on this device and link."""
    from lms.engine.installation import engine
    from lms.ir.liveness import Buffers
    from lms.schedule.op_order import executor_order
    from lms.simulate.cost_model import Costs
    from lms.simulate.step_time import clock

    (made,) = engine().books.collector.planned.values()
    if dump:
        import pickle

        Path(dump).write_bytes(pickle.dumps((made.graph, made.plan, made.base_bytes)))
    slower = SLOWER if point.real else 1.0
    costs = Costs(
        TERAFLOPS / slower * 1e12,
        DEVICE_GBPS / slower * 1e9,
        LAUNCH_US * slower * 1e-6,
        point.out_gbps / slower * 1e9,
        point.in_gbps / slower * 1e9,
    )
    seconds, plan = costs.op_seconds(made.graph), made.plan
    order = executor_order(made.graph)
    peak = Buffers.of(made.graph).timeline(order, ()).peak_position or 0
    return {
        "predicted_s": clock(plan.order, plan.swaps, costs, seconds).now_s,
        "before_s": sum(seconds[op] for op in order[: peak + 1]),
        "after_s": sum(seconds[op] for op in order[peak + 1 :]),
    }


def main() -> int:
    """Run what is missing, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "out/gpu-standin.json")
    parser.add_argument("--minutes", type=float, default=8.0, help="begin no case after that")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--real", action="store_true")
    kind.add_argument("--deep", action="store_true")
    kind.add_argument("--retries", type=int, default=0, metavar="N")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--only", default="", help="cases with this in their name, again")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--dump", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        given = json.loads(options.case)
        print(json.dumps(train(Point(**given["point"]), given["limit"], options.dump)))
        return 0
    document = json.loads(options.out.read_text()) if options.out.exists() else {}
    if not options.table:
        try:
            _run_missing(options, document)
        except stand_in.NoStandInError as error:
            print(f"gpu_standin: {error}", file=sys.stderr)
            return 2
    print(table(document))
    return 0


def _run_missing(options: argparse.Namespace, document: dict[str, Any]) -> None:
    ends = time.monotonic() + 60 * options.minutes
    for point in points(options.real, options.deep, options.retries):
        again = bool(options.only) and options.only in point.name
        # Of the one without LMS the peak is needed in any case: the others' limits are shares of it.
        is_needed = not options.only or point == plain(point.real, point.deep)
        wanted = again or (is_needed and point.name not in document)
        if not wanted or time.monotonic() > ends:
            continue
        limit = 0
        if point.policy != "off":
            limit = int(document[plain(point.real, point.deep).name]["peak_bytes"] / point.share)
        case = json.dumps({"point": asdict(point), "limit": limit})
        argv = [__file__, "--case", case, "--dump", options.dump]
        try:
            ran = stand_in.run(argv, environ(point), traced=True)
        except RuntimeError as error:
            found: dict[str, Any] = {"failed": str(error)[-600:]}
        else:
            found = _figures(ran) | {"limit_bytes": limit}
        document[point.name] = asdict(point) | found
        options.out.parent.mkdir(exist_ok=True)
        options.out.write_text(json.dumps(document, indent=1))
        print(f"{point.name}: {found.get('step_s', found.get('failed'))}", file=sys.stderr, flush=True)


def _figures(ran: stand_in.Ran) -> dict[str, Any]:
    """Return the figures of the steps behind the first two."""
    spans = ran.found.pop("spans")
    began = spans[0][0]
    copies = stand_in.copies_of(tuple(row for row in ran.rows if float(row["began"]) >= began))
    steps = [end - begin for begin, end in spans]
    return {**ran.found, "step_s": median(steps), "steps_s": steps, "hidden": copies.hidden, **asdict(copies)}


def bound_s(row: dict[str, Any], off: dict[str, Any]) -> float:
    """Compute the least time of a step: what exceeds the limit leaves before the peak, and comes back."""
    excess = max(0, off["peak_bytes"] - row["limit_bytes"])
    slower = SLOWER if row["real"] else 1.0
    scale = off["step_s"] / (off["before_s"] + off["after_s"])
    out_s, in_s = (excess / (row[way] / slower * 1e9) for way in ("out_gbps", "in_gbps"))
    return max(off["before_s"] * scale, out_s) + max(off["after_s"] * scale, in_s)


def table(document: dict[str, Any]) -> str:
    """Return the figures as a table."""
    lines = [
        "| case | limit | step | of no limit | of the bound | simulated | hidden | out, in | peak of plan |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    again = [row for row in document.values() if row.get("retry")]
    for name, row in document.items():
        if row in again:
            continue
        off = document[plain(row["real"], row.get("deep", False)).name]
        if "failed" in row:
            lines.append(f"| {name} | {row['failed'].splitlines()[-1][:60]} |")
            continue
        step, limit = row["step_s"], row["limit_bytes"] / MIB
        lines.append(
            f"| {name} | {f'{limit:.0f} MiB' if limit else 'none'} | {1e3 * step:.0f} ms | "
            f"{step / off['step_s']:.2f} | {step / bound_s(row, off) if limit else 1:.2f} | "
            f"{row['predicted_s'] / step - 1:+.0%} | {row['hidden']:.0%} | "
            f"{row['bytes_out'] / MIB:.0f}, {row['bytes_in'] / MIB:.0f} MiB | "
            f"{row['peak_bytes'] / row['planned_bytes'] - 1:+.1%} |"
        )
    if again:
        tried, failed = sum(row.get("retries", 0) > 0 for row in again), sum("failed" in row for row in again)
        lines += ["", f"{len(again)} trainings, {tried} of them tried again: {failed} failed"]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
