"""How long Large Model Support takes to edit a step, by phase, model, policy and TensorFlow.

Each case is a child process that runs the same training step several times afresh and takes medians; the
rest of the first call stands beside it, because their ratio hardly depends on what else the machine does. A
deep network of 3,000 ops and the same of 30,000 show whether the time is linear in the ops. "again" is a
function with the graph of one before it, which takes the edit that is kept.

    python bench/lms_edit.py                                   # everything
    python bench/lms_edit.py --models resnet50 --policies all --keras 2 --out result.json
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from operator import itemgetter
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

from lms_document import read_document, write_part  # noqa: E402
from models import MODELS  # noqa: E402

COLUMNS = ("parse", "shapes", "read", "filters", "residents", "plan", "write", "validate")
"""The passes of an edit, as the engine names them."""

POLICIES = ("all", "auto", "threshold")
DEEP = {"deep-3k": 28, "deep-30k": 275}
"""Residual blocks of the deep network: about 3,000 and 30,000 ops."""
BATCH = 8
SHARE = 0.6
"""``auto`` plans for this share of the step's peak; the device has the usual margin more."""
GOAL_OPS = 3000
CASE_TIMEOUT_S = 1800


def main() -> int:
    """Run one case (a child) or the whole benchmark."""
    options = _parse(sys.argv[1:])
    if options.case:
        print(json.dumps(run_case(options.case, options.policies[0], options.keras[0], options.repeats)))
        return 0
    results = [
        _child(model, policy, keras, options)
        for model in options.models
        for keras in (("-",) if model in DEEP else options.keras)
        for policy in options.policies
    ]
    print(text(results))
    if options.out:
        out = Path(options.out)
        write_part(out, "edits", merged(read_document(out).get("edits", []), results))
    return 0


def merged(earlier: Iterable[dict[str, Any]], results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """``results``, behind what was measured of other cases."""
    key = itemgetter("tensorflow", "model", "policy", "keras")
    anew = {key(one) for one in results}
    return [*(one for one in earlier if key(one) not in anew), *results]


def text(results: list[dict[str, Any]]) -> str:
    """Render the table of these cases, and how the time grows with the ops."""
    lines = [render(results)]
    for version in dict.fromkeys(one["tensorflow"] for one in results):
        growth = growths(one for one in results if one["tensorflow"] == version)
        lines += [
            f"TensorFlow {version}, {policy}: "
            f"the time per op at 30,000 ops is {ratio:.2f} of that at 3,000 (goal 1.5)"
            for policy, ratio in growth.items()
        ]
    return "\n".join(lines)


def _parse(argv: list[str]) -> argparse.Namespace:
    known = ["resnet50", "resnet152", *DEEP]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=known, default=known)
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=POLICIES)
    parser.add_argument("--keras", nargs="+", choices=("3", "2"), default=("3", "2"))
    parser.add_argument("--repeats", type=int, default=5, help="first calls a case")
    parser.add_argument(
        "--python", default=sys.executable, help="interpreter of the cases (another TensorFlow)"
    )
    parser.add_argument("--out", help="file of the JSON document; it is added to")
    parser.add_argument("--case", choices=known, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def run_case(model: str, policy: str, keras: str, repeats: int) -> dict[str, Any]:
    """Trace and edit one model's step in this process, and say how long that took."""
    import tensorflow as tf

    import lms
    from lms.engine import installation, kept_edits

    kept, kept_edits.KEPT_EDITS = kept_edits.KEPT_EDITS, 0
    make = deep_step(tf, DEEP[model]) if model in DEEP else keras_step(tf, model)
    lms.enable(policy=policy if policy != "auto" else "all", batch_size=BATCH)
    if policy == "auto":
        run(make)
        before = lms.report().graphs[-1]
        lms.disable()
        lms.enable(policy="auto", batch_size=BATCH)
        engine = installation.engine()
        share = SHARE / (1 - engine.config.margin)
        engine.resources.assume_limit(
            before.base_bytes + int(share * (before.peak_before_bytes - before.base_bytes))
        )
    watch = Stopwatch(installation.engine())
    runs = []
    for _ in range(repeats):
        watch.clear()
        whole_s = run(make)
        passes = dict(lms.report().graphs[-1].seconds)
        edit = {"edit": watch.wall_s, "edit_cpu": watch.cpu_s, "first call": whole_s - watch.wall_s}
        runs.append({**dict.fromkeys(COLUMNS, 0.0), **passes, **edit})
    last = lms.report().graphs[-1]
    kept_edits.KEPT_EDITS = kept
    again = []
    for _ in range(repeats + 1):
        watch.clear()
        run(make)
        again.append(watch.cpu_s)
    return {
        "model": model,
        "keras": keras,
        "policy": policy,
        "tensorflow": tf.__version__,
        "ops": last.ops,
        "edited": last.edited,
        "why": last.why,
        "seconds": {key: median(run[key] for run in runs) for key in runs[0]},
        "edits_s": [run["edit"] for run in runs],
        "again_s": median(again[1:]),
    }


class Stopwatch:
    """Times the edits of an engine, in seconds on the clock and of this thread's processor time."""

    def __init__(self, engine: Any) -> None:
        from lms.optimizer import plugin

        self.clear()
        self._edit = engine.edit
        plugin.arm(self._timed, engine.fault)

    def clear(self) -> None:
        """Begin anew."""
        self.wall_s = self.cpu_s = 0.0

    def _timed(self, request: Any) -> Any:
        began, cpu = time.perf_counter(), time.thread_time()
        try:
            return self._edit(request)
        finally:
            self.wall_s += time.perf_counter() - began
            self.cpu_s += time.thread_time() - cpu


def run(make: Callable[[], Any]) -> float:
    """Call a fresh function for the first time: TensorFlow optimizes it. How many seconds all that took."""
    function, arguments = make()
    began = time.perf_counter()
    function(*arguments)
    return time.perf_counter() - began


def keras_step(tf: Any, name: str) -> Callable[[], Any]:
    """Build what ``fit`` traces: a Keras model's own training step, with an open batch dimension."""
    shape = MODELS[name].input_shape(BATCH)
    model = MODELS[name].build(tf.keras, shape[1:])
    model.compile(
        tf.keras.optimizers.SGD(0.1, momentum=0.9),
        tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    specs = [(tf.TensorSpec((None, *shape[1:])), tf.TensorSpec((None,), tf.int32))]
    data = (tf.zeros(shape), tf.zeros((shape[0],), tf.int32))
    model.optimizer.build(model.trainable_variables)
    tf.function(model.train_step).get_concrete_function(specs[0])  # makes what is made once
    return lambda: (tf.function(lambda data: model.train_step(data), input_signature=specs), (data,))


def deep_step(tf: Any, blocks: int) -> Callable[[], Any]:
    """Build a residual network of so many blocks in a loop of one's own."""
    filters = 4
    weights = [
        [
            tf.Variable(tf.zeros((3, 3, filters, filters))),
            tf.Variable(tf.ones(filters)),
            tf.Variable(tf.zeros(filters)),
        ]
        for _ in range(2 * blocks)
    ]
    flat = [variable for layer in weights for variable in layer]
    momenta = [tf.Variable(tf.zeros_like(variable)) for variable in flat]

    def layer(x: Any, kernel: Any, scale: Any, offset: Any) -> Any:
        return tf.nn.relu(
            tf.compat.v1.nn.fused_batch_norm(tf.nn.conv2d(x, kernel, 1, "SAME"), scale, offset)[0]
        )

    def step(images: Any) -> Any:
        with tf.GradientTape() as tape:
            x = images
            for first, second in zip(weights[::2], weights[1::2], strict=True):
                x = x + layer(layer(x, *first), *second)
            loss = tf.reduce_mean(x)
        for variable, momentum, gradient in zip(flat, momenta, tape.gradient(loss, flat), strict=True):
            momentum.assign(0.9 * momentum + gradient)
            variable.assign_sub(0.1 * momentum)
        return loss

    return lambda: (tf.function(lambda images: step(images)), (tf.zeros((BATCH, 64, 64, filters)),))


def _child(model: str, policy: str, keras: str, options: argparse.Namespace) -> dict[str, Any]:
    argv = [options.python, str(Path(__file__).resolve()), "--case", model, "--policies", policy]
    argv += ["--repeats", str(options.repeats), "--keras", "3" if keras == "-" else keras]
    environ = os.environ | {
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "TF_USE_LEGACY_KERAS": "1" if keras == "2" else "0",
    }
    done = subprocess.run(
        argv, env=environ, capture_output=True, text=True, timeout=CASE_TIMEOUT_S, check=False
    )
    if done.returncode:
        raise SystemExit(f"{model} {policy} failed:\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1]) | {"keras": keras}
    print("  ".join(_row(found)), file=sys.stderr, flush=True)
    return found


def growths(results: Iterable[dict[str, Any]]) -> dict[str, float]:
    """By policy the time per op of the deep network of 30,000 ops over that of the one of 3,000."""
    per_op = {(one["model"], one["policy"]): one["seconds"]["edit_cpu"] / one["ops"] for one in results}
    return {
        policy: seconds / per_op["deep-3k", policy]
        for (model, policy), seconds in per_op.items()
        if model == "deep-30k" and ("deep-3k", policy) in per_op
    }


HEADINGS = (
    "TensorFlow",
    "model",
    "Keras",
    "policy",
    "ops",
    *COLUMNS,
    "edit ms",
    "cpu ms",
    "3,000 ops",
    "again ms",
    "first call s",
    "edit/first call",
)


def render(results: Iterable[dict[str, Any]]) -> str:
    """Render the results as a table; passes in milliseconds."""
    rows = [HEADINGS, *(_row(result) for result in results)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADINGS))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows
    )


def _row(result: dict[str, Any]) -> tuple[str, ...]:
    seconds = result["seconds"]
    return (
        result["tensorflow"],
        result["model"],
        result["keras"],
        result["policy"],
        f"{result['ops']:,}",
        *(f"{seconds[phase] * 1000:.0f}" for phase in COLUMNS),
        f"{seconds['edit'] * 1000:.0f}",
        f"{seconds['edit_cpu'] * 1000:.0f}",
        f"{seconds['edit_cpu'] / result['ops'] * GOAL_OPS * 1000:.0f}",
        f"{result['again_s'] * 1000:.0f}",
        f"{seconds['first call']:.2f}",
        f"{seconds['edit'] / seconds['first call']:.2f}",
    )


if __name__ == "__main__":
    sys.exit(main())
