"""How much more fits with Large Model Support, and what it costs.

Each case is a child process on the CPU device with a hard memory limit, which stands in for a small GPU.
Prints one table, and writes one JSON document with everything that was measured.

    python bench/lms.py                          # all models, Keras 3
    python bench/lms.py --models resnet50 --keras 2 --out result.json
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

from models import MODELS  # noqa: E402

MIB = 1 << 20
CASE_TIMEOUT_S = 900
STEPS = 3


def main() -> int:
    """Run one case (a child) or the whole benchmark."""
    options = _parse(sys.argv[1:])
    if options.case:
        print(json.dumps(run_case(options.case, options.units, options.policy, options.budget_mb)))
        return 0
    results = [bench_model(name, options) for name in options.models]
    print(render(results))
    if options.out:
        document = {"schema": "lmsrun.bench-lms/1", "keras": options.keras, "results": results}
        Path(options.out).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--keras", choices=("3", "2"), default="3")
    parser.add_argument(
        "--python", default=sys.executable, help="interpreter of the cases (another TensorFlow)"
    )
    parser.add_argument("--out", help="file for the JSON document")
    parser.add_argument("--case", choices=MODELS, help=argparse.SUPPRESS)
    parser.add_argument("--units", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--policy", default="off", help=argparse.SUPPRESS)
    parser.add_argument("--budget-mb", type=int, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def run_case(name: str, units: int, policy: str, budget_mb: int | None) -> dict[str, Any]:
    """Train a few steps in this process and say what happened."""
    import numpy as np
    import tensorflow as tf

    if policy == "off":
        tf.config.optimizer.set_experimental_options({"arithmetic_optimization": False})
    else:
        import lms

        budget = {} if budget_mb is None else {"budget_bytes": budget_mb * MIB}
        lms.enable(policy=policy, **budget)
    _claim_pool(tf)
    tf.keras.utils.set_random_seed(1)
    shape = MODELS[name].input_shape(units)
    model = MODELS[name].build(tf.keras, shape[1:])
    model.compile("sgd", tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    random = np.random.RandomState(0)
    images = tf.constant(random.rand(*shape).astype("f"))
    labels = tf.constant(random.randint(0, 4, shape[0]))
    data = tf.data.Dataset.from_tensors((images, labels)).repeat(STEPS)
    times: list[float] = []

    class Clock(tf.keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            self.started = time.perf_counter()

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            times.append(time.perf_counter() - self.started)

    tf.config.experimental.reset_memory_stats("CPU:0")
    model.fit(data, epochs=1, verbose=0, callbacks=[Clock()])
    seen = {
        "units": units,
        "policy": policy,
        "tensorflow": tf.__version__,
        "step_s": min(times[1:]),
        "peak_bytes": tf.config.experimental.get_memory_info("CPU:0")["peak"],
    }
    return seen | (_planned(lms.report()) if policy != "off" else {})


def _claim_pool(tf: Any) -> None:
    """Make the allocator take its pool in one piece: what follows measures need, not fragments."""
    limit = int(os.environ["TF_CPU_BFC_MEM_LIMIT_IN_MB"]) * MIB
    tf.zeros((int(limit * 0.92) // 4,))


def _planned(report: Any) -> dict[str, Any]:
    last = report.graphs[-1]
    return {
        "edited": last.edited,
        "ops": last.ops,
        "planned_peak_bytes": last.planned_peak_bytes,
        "measured_peak_bytes": report.measured_peak_bytes,
        "peak_before_bytes": last.peak_before_bytes,
        "base_bytes": last.base_bytes,
        "bytes_out": last.bytes_out,
        "bytes_in": last.bytes_in,
        "tensors": last.tensors,
        "edit_s": last.edit_s,
        "notes": list(last.notes),
    }


def bench_model(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Everything about one model: the limits with and without, and the costs."""
    limit = MODELS[name].limit_mb

    def attempt(policy: str, **more: int) -> Callable[[int], dict[str, Any] | None]:
        return lambda units: _child(name, units, policy, limit, options, **more)

    probe = attempt("all")(2)
    if probe is None:
        raise SystemExit(f"{name}: two units do not fit into {limit} MiB even with LMS; raise the limit")
    before = _guess(limit, probe["base_bytes"], probe["peak_before_bytes"], 2)
    without = largest(attempt("off"), before)
    double = without["units"] * 2
    auto, everything = attempt("auto")(double), attempt("all")(double)
    with_all = largest(attempt("all"), _line_meets(limit * MIB, probe, everything))
    found = {
        "model": name,
        "unit": MODELS[name].unit,
        "limit_mb": limit,
        "target": MODELS[name].target,
        "without": without,
        "with": with_all,
        "multiple": with_all["units"] / without["units"],
        "time_ratio": (with_all["step_s"] / with_all["units"]) / (without["step_s"] / without["units"]),
        "peak_error": with_all["measured_peak_bytes"] / with_all["planned_peak_bytes"] - 1,
        "auto_at_double": auto,
        "all_at_double": everything,
    }
    print(_line(found), file=sys.stderr, flush=True)
    return found


def _guess(limit_mb: int, base: int, peak: int, units: int) -> int:
    return max(1, int((limit_mb * MIB - base) / max(1, (peak - base) / units)))


def _line_meets(limit: int, first: dict[str, Any], second: dict[str, Any] | None) -> int:
    """Where the planned peak of two runs, taken as a line, meets the limit."""
    if second is None:
        return first["units"] * 2
    growth = (second["planned_peak_bytes"] - first["planned_peak_bytes"]) / (second["units"] - first["units"])
    rest = limit - second["planned_peak_bytes"]
    return max(1, second["units"] + int(0.97 * rest / max(1.0, growth)))


def largest(attempt: Callable[[int], dict[str, Any] | None], guess: int) -> dict[str, Any]:
    """The result at the largest number of units that works, to within 4%; starts at ``guess``.

    Raises:
        SystemExit: If not even one unit works.
    """
    good: dict[str, Any] | None = None
    low, high, units = 0, 0, guess
    while high - low > max(1, low // 25) or not high:
        result = attempt(units)
        if result is not None:
            good, low = result, units
        else:
            high = units
        if high:
            units = (low + high) // 2 if low else max(1, high * 2 // 3)
        else:
            units = low + max(1, low * 2 // 5)
        if high == 1:
            raise SystemExit("not even one unit fits")
    if good is None:
        raise SystemExit("nothing fits")
    return good


def _child(
    name: str, units: int, policy: str, limit_mb: int, options: argparse.Namespace, **more: int
) -> dict[str, Any] | None:
    """One case in a process of its own; ``None`` when it ran out of memory (often a segmentation fault)."""
    argv = [options.python, str(Path(__file__).resolve()), "--case", name, "--units", str(units)]
    argv += ["--policy", policy, *(text for key, value in more.items() for text in (f"--{key}", str(value)))]
    environ = {
        **os.environ,
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "TF_CPU_ALLOCATOR_USE_BFC": "true",
        "TF_CPU_BFC_MEM_LIMIT_IN_MB": str(limit_mb),
        "TF_USE_LEGACY_KERAS": "1" if options.keras == "2" else "0",
    }
    done = subprocess.run(
        argv, env=environ, capture_output=True, text=True, timeout=CASE_TIMEOUT_S, check=False
    )
    fits = done.returncode == 0
    print(f"{name} {policy} {units}: {'fits' if fits else 'does not fit'}", file=sys.stderr, flush=True)
    if not fits and done.returncode > 0 and "OOM" not in done.stderr and "memory" not in done.stderr:
        raise SystemExit(f"{name} {policy} {units} failed for another reason:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1]) if fits else None


HEADINGS = ("model", "limit", "without", "with", "multiple", "goal", "time/unit", "peak error", "edit")


def render(results: Iterable[dict[str, Any]]) -> str:
    """The results as a table."""
    rows = [HEADINGS, *(_row(result) for result in results)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADINGS))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows
    )


def _row(result: dict[str, Any]) -> tuple[str, ...]:
    last = result["with"]
    return (
        result["model"],
        f"{result['limit_mb']} MiB",
        str(result["without"]["units"]),
        str(last["units"]),
        f"{result['multiple']:.1f}x",
        f"{result['target']:g}x",
        f"{result['time_ratio']:.2f}",
        f"{result['peak_error']:+.1%}",
        f"{last['edit_s'] * 1000:.0f} ms for {last['ops']:,} ops",
    )


def _line(result: dict[str, Any]) -> str:
    return "  ".join(_row(result))


if __name__ == "__main__":
    sys.exit(main())
