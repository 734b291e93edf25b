"""Trains cases without LMS, twice, and with it under each policy; prints what each found as JSON.

    python tests/lms/bits/bits_job.py encoder vit            # 20 steps each, or what the case says
    python tests/lms/bits/bits_job.py --steps 3 --modes plain,again,all encoder
    python tests/lms/bits/bits_job.py --list

``plain`` and ``again`` are TensorFlow's own settings, but for its memory optimizer. ``all`` is that policy.
``budget`` has half of what the plain step takes beside what stays; it needs ``plain`` before it.
``recompute`` recomputes and swaps nothing, ``hybrid`` is ``budget`` with both, planned for a slow link.
``auto`` is the default, for a process with a hard limit (``TF_CPU_BFC_MEM_LIMIT_IN_MB``). A case on ranks is
started once a rank.
"""

import argparse
import gc
import json
import os
import time
import warnings
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("TF_CPU_ALLOCATOR_USE_BFC", "true")  # it alone counts what a CPU device holds

import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402
from bits_cases import all_cases  # noqa: E402
from case_tools import Case, Variables, digest, prepare, values_of  # noqa: E402

MODES = ("plain", "again", "all", "budget")
PLAIN = ("plain", "again")
RECOMPUTING: dict[str, tuple[str, dict[str, Any]]] = {
    "auto": ("auto", {}),
    "recompute": ("all", {"recompute": "only"}),
    "hybrid": ("budget", {"recompute": "auto", "bandwidth_gb_s": 0.02}),
}
"""Modes with the policy and the further settings of each; modes that are not here swap alone."""
DEVICE = "CPU:0"
MIN_TENSOR_BYTES = 1024
LIMIT = "TF_CPU_BFC_MEM_LIMIT_IN_MB"
CLAIMS = (0.92, 0.8, 0.7, 0.6, 0.5)
"""Shares of a pool to try, the largest first."""
SHOWN = 5
"""Variables of which a difference is told one by one."""


def main() -> None:
    """Train what is asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*")
    parser.add_argument(
        "--list", action="store_true", help="print the names of the cases, and what they need"
    )
    parser.add_argument("--steps", type=int, help="steps of each training; default: the case's own")
    parser.add_argument(
        "--modes",
        default=",".join(MODES),
        help="trainings, in order, of: " + ", ".join([*MODES, *RECOMPUTING]),
    )
    parser.add_argument("--least", type=int, default=MIN_TENSOR_BYTES, help="min_tensor_bytes")
    options = parser.parse_args()
    cases = all_cases()
    if options.list:
        fields = ("steps", "devices", "ranks", "swaps", "same_twice")
        told = {name: {field: getattr(case, field) for field in fields} for name, case in cases.items()}
        print(json.dumps(told))
        return
    if unknown := [name for name in options.cases if name not in cases]:
        parser.error(f"no case {', '.join(unknown)}; there are {', '.join(cases)}")
    chosen = {name: cases[name] for name in options.cases}
    prepare(max((case.devices for case in chosen.values()), default=1))
    rank = 0
    if any(case.ranks > 1 for case in chosen.values()):
        import horovod.tensorflow as hvd

        hvd.init()
        rank = hvd.rank()
    _claim_pool()
    modes = options.modes.split(",")
    found: dict[str, Any] = {
        name: compare(case, modes, options.steps or case.steps, options.least)
        for name, case in chosen.items()
    }
    print(json.dumps({"rank": rank, **found}), flush=True)


def compare(case: Case, modes: Sequence[str], steps: int, least: int) -> dict[str, Any]:
    """Train a case in each mode: by mode its digest, and what LMS did."""
    seen: dict[str, Any] = {}
    values: dict[str, dict[str, Any]] = {}
    for mode in modes:
        config = _config_of(mode, seen.get("plain"), least)
        values[mode], seen[mode] = _observe(case, steps, {**config, **case.options} if config else {})
    base = next((values[mode] for mode in PLAIN if mode in values), None)
    for mode in modes:
        if base is not None and values[mode]:
            seen[mode]["apart"] = apart(base, values[mode])
    return seen


def _config_of(mode: str, plain: dict[str, Any] | None, least: int) -> dict[str, Any]:
    if mode in PLAIN:
        return {}
    policy, further = RECOMPUTING.get(mode, (mode, {"recompute": "off"}))
    config = {"policy": policy, "min_tensor_bytes": least, **further}
    if policy == "budget":
        if plain is None:
            raise SystemExit(f"mode {mode} needs the peak of mode plain before it")
        config["budget_bytes"] = max(1, (plain["peak_bytes"] - plain["held_bytes"]) // 2)
    return config


def _observe(case: Case, steps: int, config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Train once; the values of all variables, and what is told of the training."""
    gc.collect()
    tf.config.experimental.reset_memory_stats(DEVICE)
    before, started = _memory()["current"], time.perf_counter()
    seen: dict[str, Any] = dict(config)
    values: dict[str, Any] = {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if config:
            import lms

            lms.enable(enabled=True, **config)
        try:
            variables: Variables = case.train(steps)
            memory = _memory()
            values = values_of(variables)
        except Exception as error:
            if not config:
                raise
            seen["error"] = f"{type(error).__name__}: {error}"[:2000]
            memory = _memory()
        if config:
            seen |= _told(lms.report())
            lms.disable()
    seen["warnings"] = sorted(
        {str(one.message) for one in caught if type(one.message).__module__.startswith("lms")}
    )
    seen["digest"] = digest(values) if values else None
    seen["finite"] = all(np.isfinite(value.astype("float64")).all() for value in values.values())
    seen["seconds"] = round(time.perf_counter() - started, 2)
    seen |= {"before_bytes": before, "held_bytes": memory["current"], "peak_bytes": memory["peak"]}
    return values, seen


def _told(report: Any) -> dict[str, Any]:
    """What LMS says of a training: tensors that its plans swap, and how often one was."""
    return {
        "tensors": sum(graph.tensors for graph in report.graphs),
        "repeated": sum(graph.recomputed.ops for graph in report.edited if graph.recomputed),
        "swap_outs": report.store.swap_outs,
        "graphs": len(report.graphs),
        "edited": len(report.edited),
        "planned_peak_bytes": report.planned_peak_bytes,
        "measured_peak_bytes": report.measured_peak_bytes,
        "why": sorted({graph.why for graph in report.graphs}),
    }


def _memory() -> dict[str, int]:
    found: dict[str, int] = tf.config.experimental.get_memory_info(DEVICE)
    return found


def _claim_pool() -> None:
    """Have the allocator take a limited pool in one piece: what follows measures need, not fragments."""
    for share in CLAIMS if LIMIT in os.environ else ():
        try:
            tf.zeros((int(int(os.environ[LIMIT]) * share * 2**20) // 4,))
        except tf.errors.ResourceExhaustedError:  # it has a part already: a small pool is not left whole
            continue
        return


def apart(base: dict[str, Any], other: dict[str, Any]) -> dict[str, float | None]:
    """By variable how far two trainings are apart, for the first few whose bits differ."""
    if set(base) != set(other):
        return dict.fromkeys(sorted(set(base) ^ set(other))[:SHOWN])
    differ = [name for name, value in base.items() if value.tobytes() != other[name].tobytes()]
    return {
        name: float(np.max(np.abs(base[name].astype("float64") - other[name].astype("float64"))))
        for name in differ[:SHOWN]
    }


if __name__ == "__main__":
    main()
