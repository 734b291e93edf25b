"""Trains random graphs with and without LMS; prints as JSON which seeds give other bits.

python tests/lms/bits/random_graphs_job.py 0 1000          # seeds 0 to 999, policy all
python tests/lms/bits/random_graphs_job.py 17 1 budget     # seed 17 again, under half of its peak
python tests/lms/bits/random_graphs_job.py 0 100 plain     # without LMS both times
"""

import argparse
import json
import os
import time
import warnings
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("TF_CPU_ALLOCATOR_USE_BFC", "true")  # it alone counts what a CPU device holds

import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402
from case_tools import prepare  # noqa: E402
from racing_sums import racing_sums  # noqa: E402
from random_graphs import train  # noqa: E402
from tensorflow.python.eager import context  # noqa: E402

DEVICE, MIN_TENSOR_BYTES = "CPU:0", 256


def main() -> None:
    """Compare every seed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("first", type=int)
    parser.add_argument("count", type=int)
    parser.add_argument("policy", nargs="?", default="all", choices=("all", "budget", "plain"))
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    prepare(devices=1)
    started = time.perf_counter()
    found: dict[str, Any] = {
        "first": options.first,
        "count": options.count,
        "policy": options.policy,
        "differ": {},
        "left to chance": {},
        "failed": {},
        "not finite": [],
        "swapped": {},
    }
    for seed in range(options.first, options.first + options.count):
        _compare(seed, options.policy, found)
        tf.keras.backend.clear_session()
    swapped = found["swapped"].values()
    found["tensors"], found["unswapped"] = (
        sum(swapped),
        [seed for seed, n in found.pop("swapped").items() if not n],
    )
    print(json.dumps(found | {"seconds": round(time.perf_counter() - started, 1)}), flush=True)


def _compare(seed: int, policy: str, found: dict[str, Any]) -> None:
    """Train one seed twice, and note what is to be told."""
    tf.config.experimental.reset_memory_stats(DEVICE)
    off, racing = _train_plain(seed)
    peak = tf.config.experimental.get_memory_info(DEVICE)
    if policy != "plain":
        import lms

        half = max(1, (peak["peak"] - peak["current"]) // 2)
        budget = {"budget_bytes": half} if policy == "budget" else {}
        lms.enable(enabled=True, policy=policy, min_tensor_bytes=MIN_TENSOR_BYTES, **budget)
    try:
        on = train(seed)
    except Exception as error:
        found["failed"][seed] = f"{type(error).__name__}: {error}"[:1000]
        return
    finally:
        if policy != "plain":
            found["swapped"][seed] = sum(graph.tensors for graph in lms.report().graphs)
            lms.disable()
    if any(one.tobytes() != other.tobytes() for one, other in zip(off, on, strict=True)):
        kind = "left to chance" if racing else "differ"
        found[kind][seed] = max(float(np.abs(one - other).max()) for one, other in zip(off, on, strict=True))
    if not all(np.isfinite(one).all() for one in off):
        found["not finite"].append(seed)


def _train_plain(seed: int) -> tuple[Any, list[str]]:
    """Train without LMS; and the sums of the graph whose order is left to chance."""
    context.enable_graph_collection()
    try:
        values = train(seed)
        graphs = [one.post_optimization_graph for one in context.export_run_metadata().function_graphs]
    finally:
        context.disable_graph_collection()
    return values, [name for graph in graphs for name in racing_sums(graph)]


if __name__ == "__main__":
    main()
