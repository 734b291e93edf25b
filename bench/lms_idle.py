"""The price of Large Model Support for a job that does not need it: its first step and the later ones.

Each round is a pair of processes, one without and one with it, that take turns in going first; they train
the same model from its first batch. Two cases: a device of unknown size, where a step is never read, and one
with ample memory, where LMS has to see that the step fits. Processor time of the process (all threads) and
time by the clock; the figure is the median of the pairs' ratios.

    python bench/lms_idle.py                                   # everything; a quarter of an hour
    python bench/lms_idle.py --models deep-3k --rounds 5
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

from lms_document import write_part  # noqa: E402
from lms_edit import DEEP, deep_step, keras_step  # noqa: E402

MODELS = ("resnet50", "deep-3k")
CASES = {"size unknown": {}, "ample memory": {"TF_CPU_BFC_MEM_LIMIT_IN_MB": "6000"}}
"""What the environment of both processes of a pair holds."""
GOAL = 1.03
CASE_TIMEOUT_S = 600
FIGURES = ("first_cpu_s", "first_s", "later_s", "enable_s")


def main() -> int:
    """Train once (a child), or run the whole benchmark."""
    options = _parse(sys.argv[1:])
    if options.child:
        print(json.dumps(train(options.child, with_lms=options.lms, steps=options.steps)))
        return 0
    results = [measure(model, case, options) for model in options.models for case in CASES]
    print(render(results))
    if options.out:
        write_part(Path(options.out), "idle", results)
    return 0


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--rounds", type=int, default=7, help="pairs of processes a case")
    parser.add_argument("--steps", type=int, default=12, help="steps after the first")
    parser.add_argument("--out", help="file of the JSON document; it is added to")
    parser.add_argument("--child", choices=MODELS, help=argparse.SUPPRESS)
    parser.add_argument("--lms", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def train(model: str, *, with_lms: bool, steps: int) -> dict[str, float]:
    """Train in this process; return seconds of the first step, of a later one, and of switching LMS on."""
    import tensorflow as tf

    began = time.perf_counter()
    if with_lms:
        import lms

        lms.enable(policy="auto")
    enable_s = time.perf_counter() - began
    make = deep_step(tf, DEEP[model]) if model in DEEP else keras_step(tf, model)
    step, arguments = make()
    began, cpu = time.perf_counter(), time.process_time()
    step(*arguments)
    first_s, first_cpu_s = time.perf_counter() - began, time.process_time() - cpu
    later = []
    for _ in range(steps):
        began = time.perf_counter()
        step(*arguments)
        later.append(time.perf_counter() - began)
    return {"first_s": first_s, "first_cpu_s": first_cpu_s, "later_s": median(later), "enable_s": enable_s}


def measure(model: str, case: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run the pairs of one case."""
    pairs = []
    for number in range(options.rounds):
        turns = (False, True) if number % 2 else (True, False)
        found = {with_lms: _child(model, case, options, with_lms=with_lms) for with_lms in turns}
        pairs.append((found[False], found[True]))
    ratios = {
        name: sorted(on[name] / off[name] for off, on in pairs) for name in FIGURES if name != "enable_s"
    }
    return {
        "model": model,
        "case": case,
        "without": {name: median(off[name] for off, _ in pairs) for name in FIGURES},
        "with": {name: median(on[name] for _, on in pairs) for name in FIGURES},
        "ratios": ratios,
    }


def _child(model: str, case: str, options: argparse.Namespace, *, with_lms: bool) -> dict[str, float]:
    argv = [sys.executable, __file__, "--child", model, "--steps", str(options.steps)]
    environ = {
        **os.environ,
        **CASES[case],
        "TF_CPU_ALLOCATOR_USE_BFC": "true",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "CUDA_VISIBLE_DEVICES": "",
    }
    done = subprocess.run(
        [*argv, *(["--lms"] if with_lms else [])],
        env=environ,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=CASE_TIMEOUT_S,
    )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def render(results: list[dict[str, Any]]) -> str:
    """Return the table of these cases."""
    lines = [
        f"| model | memory | first step, CPU s | goal {GOAL} | by the clock, s | ratio | later, ms | ratio |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for one in results:
        off, ratios = one["without"], one["ratios"]
        lines.append(
            f"| {one['model']} | {one['case']} | {off['first_cpu_s']:.2f} | {_spread(ratios['first_cpu_s'])} "
            f"| {off['first_s']:.2f} | {_spread(ratios['first_s'])} "
            f"| {off['later_s'] * 1000:.1f} | {_spread(ratios['later_s'])} |"
        )
    return "\n".join(lines)


def _spread(ratios: list[float]) -> str:
    return f"{median(ratios):.3f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"


if __name__ == "__main__":
    sys.exit(main())
