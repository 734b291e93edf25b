"""How near the planner's step time is to the measured one on the CPU device: estimated, and with a profile.

Each case is a child process: a network is trained for a few steps as planned, then a few under
``lms.profile()``. The timed simulator then tells the time of that plan by estimated and by measured times of
its ops. It runs one op at a time, as a GPU does.

    python bench/lms_profile.py                     # every case
    python bench/lms_profile.py --models unet --out result.json
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # before this folder, which has a lms.py

from lms_document import write_part

POLICIES = ("auto", "all")
WARM, TIMED, PROFILED = 3, 8, 5


def _transformer(keras: Any, shape: tuple[int, ...]) -> Any:
    """Build a small encoder of four blocks."""
    layers = keras.layers
    x = inputs = keras.Input(shape)
    for _ in range(4):
        y = layers.LayerNormalization()(x)
        x = layers.Add()([x, layers.MultiHeadAttention(4, 32, dropout=0.1)(y, y)])
        y = layers.Dense(512, activation="gelu")(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.Dense(128)(y)])
    return keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling1D()(x)))


def _build(name: str) -> tuple[Any, tuple[int, ...]]:
    import keras
    from models import MODELS

    keras.utils.set_random_seed(0)
    if name == "transformer":
        shape: tuple[int, ...] = (32, 128, 128)
        return _transformer(keras, shape[1:]), shape
    model, units = {"resnet50": (MODELS["resnet50"], 16), "unet": (MODELS["unet3d-plain"], 4)}[name]
    shape = model.input_shape(units)
    return model.build(keras, shape[1:]), shape


NAMES = ("resnet50", "transformer", "unet")


def case(name: str, policy: str) -> dict[str, float]:
    """Train, profile and predict one network, in this process."""
    import keras
    import numpy as np

    import lms
    from lms.engine.installation import engine
    from lms.simulate.step_time import clock

    lms.enable(policy=policy)
    model, shape = _build(name)
    x = np.random.default_rng(0).normal(size=shape).astype("float32")
    y = np.zeros((shape[0], *model.output_shape[1:-1]), "int32")
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False)

    def timed(count: int) -> list[float]:
        spent = []
        for _ in range(count):
            began = perf_counter()
            model.train_on_batch(x, y)
            spent.append(perf_counter() - began)
        return spent

    timed(WARM)
    measured = timed(TIMED)
    with lms.profile():
        under = timed(PROFILED)
    measured += timed(TIMED)
    planned = max(engine().books.collector.planned.values(), key=lambda one: len(one.graph.ops))
    profile = engine().resources.profiles().find(planned.unedited)

    def predicted(costs: Any) -> float:
        seconds = costs.op_seconds(planned.graph)
        return clock(planned.plan.order, planned.plan.swaps, costs, seconds).now_s

    return {
        "measured_s": median(measured),
        "under_profile_s": median(under),
        "estimated_s": predicted(planned.costs),
        "profiled_s": predicted(replace(planned.costs, profile_s=profile)),
        "ops": len(planned.graph.ops),
        "swaps": len(planned.plan.swaps),
    }


def run(name: str, policy: str) -> dict[str, Any]:
    """Run a case in a child process with a cache of its own for profiles."""
    with tempfile.TemporaryDirectory() as cache:
        environ = {**os.environ, "XDG_CACHE_HOME": cache, "TF_CPP_MIN_LOG_LEVEL": "3"}
        if built := os.environ.get("HOME"):
            os.makedirs(f"{cache}/lmsrun")
            os.symlink(f"{built}/.cache/lmsrun/ops", f"{cache}/lmsrun/ops")
        argv = [sys.executable, __file__, "--case", name, policy]
        done = subprocess.run(argv, env=environ, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {"model": name, "policy": policy, **found}


def text(rows: list[dict[str, Any]]) -> str:
    """Render the cases as a table."""
    lines = [
        f"{'model':14}{'policy':8}{'measured ms':>12}{'estimated':>12}{'profiled':>12}{'under profile':>15}"
    ]
    for row in rows:
        shares = [row[name] / row["measured_s"] for name in ("estimated_s", "profiled_s", "under_profile_s")]
        told = "".join(f"{one:>{width}.2f}" for one, width in zip(shares, (12, 12, 15), strict=True))
        lines.append(f"{row['model']:14}{row['policy']:8}{1000 * row['measured_s']:12.1f}{told}")
    return "\n".join(lines)


def main() -> int:
    """Run the cases."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--out", type=Path, help="file of the JSON document; it is added to")
    parser.add_argument("--case", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        print(json.dumps(case(*args.case)))
        return 0
    rows = [run(name, policy) for name in args.models for policy in POLICIES]
    print(text(rows))
    if args.out:
        write_part(args.out, "profile", {"rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
