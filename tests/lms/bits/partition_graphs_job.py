"""Compares the graphs that TensorFlow runs in the end, without LMS and with it; prints JSON.

    python tests/lms/bits/partition_graphs_job.py encoder          # policy all
    python tests/lms/bits/partition_graphs_job.py encoder plain    # without LMS both times
    python tests/lms/bits/partition_graphs_job.py encoder recompute

A partition graph is what one device runs, after all passes. Of each function that has one, it is told which
ops are missing or extra, and which read or wait for something else; what is read through LMS's own ops is the
same. ``control edges extra`` are those that LMS puts between two of TensorFlow's ops.
"""

import argparse
import json
import os
import warnings
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("TF_CPU_ALLOCATOR_USE_BFC", "true")

from bits_cases import all_cases  # noqa: E402
from case_tools import Case, prepare  # noqa: E402
from graph_difference import ADDED_EDGES, KINDS, difference, paired  # noqa: E402
from tensorflow.python.eager import context  # noqa: E402

LEAST_OPS = 30
"""Smaller functions are TensorFlow's own, such as those that fill a variable."""
SHOWN = 20


def main() -> None:
    """Compare one case."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("case")
    parser.add_argument("policy", nargs="?", default="all", choices=("all", "plain", "recompute"))
    parser.add_argument("--least", type=int, default=1024, help="min_tensor_bytes")
    options = parser.parse_args()
    case = all_cases()[options.case]
    warnings.simplefilter("ignore")
    prepare(case.devices)
    plain = functions_of(case)
    tensors = edges = repeated = 0
    if options.policy != "plain":
        import lms
        from lms.intercept import oom_retry

        # The stand-in for the batches of a first step has functions of its own, which are collected, too.
        oom_retry._further_tries = lambda config: iter(())

        recompute = "only" if options.policy == "recompute" else "off"
        lms.enable(enabled=True, policy="all", recompute=recompute, min_tensor_bytes=options.least)
    edited = functions_of(case)
    if options.policy != "plain":
        graphs = lms.report().graphs
        tensors, edges = (
            sum(getattr(graph, name) for graph in graphs) for name in ("tensors", "control_edges")
        )
        repeated = sum(graph.recomputed.ops for graph in graphs if graph.recomputed)
    found = [told(one, other) for one, other in paired(plain, edited, LEAST_OPS)]
    run_twice = sum(
        node.name.endswith("/lms/again")
        for one, other in paired(plain, edited, LEAST_OPS)
        for partition in other or ()
        for node in partition.node
    )
    whole = {
        "case": options.case,
        "tensors": tensors,
        "control_edges": edges,
        "repeated": repeated,
        "run_twice": run_twice,
        "functions": found,
    }
    print(json.dumps(whole), flush=True)


def functions_of(case: Case) -> list[Any]:
    """The partitions of each function that ran in one step."""
    context.enable_graph_collection()
    try:
        case.train(1)
        collected = context.export_run_metadata().function_graphs
    finally:
        context.disable_graph_collection()
    return [list(function.partition_graphs) for function in collected if function.partition_graphs]


def told(plain: Any, edited: Any) -> dict[str, Any]:
    """Count what differs, and name some of it."""
    if plain is None or edited is None:
        missing = "with LMS" if edited is None else "without LMS"
        size = sum(len(partition.node) for partition in plain or edited)
        return {
            "nodes": size,
            "ours": 0,
            "unpaired": f"no such function {missing}",
            "counts": {},
            "equal": False,
        }
    found = difference(plain, edited)
    equal = not any(found[kind] for kind in KINDS)
    listed = (*KINDS, ADDED_EDGES)
    counts = {kind: len(found[kind]) for kind in listed}
    return {**found, **{kind: found[kind][:SHOWN] for kind in listed}, "counts": counts, "equal": equal}


if __name__ == "__main__":
    main()
