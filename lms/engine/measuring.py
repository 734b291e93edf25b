"""Keep the measured times of the steps that an engine has planned."""

from typing import TYPE_CHECKING

from lms.errors import LMSError
from lms.planner.segments import SEGMENT
from lms.profiling.op_trace import calls_of, cpu_seconds, gpu_seconds, kernels_of
from lms.reader.survey import BODY_ATTRS

if TYPE_CHECKING:
    from lms.engine.engine import Engine


def keep(engine: "Engine", trace: bytes) -> dict[str, str]:
    """Keep the times of all planned steps that a trace holds; return a line for each.

    Raises:
        LMSError: If the trace holds none, or the times cannot be kept.
    """
    on_gpu = engine.resources.devices[0].type == "GPU"
    events = kernels_of(trace) if on_gpu else calls_of(trace)
    kept: dict[str, str] = {}
    steps = [*engine.books.collector.planned.values()]
    for planned in steps:
        if planned.function and planned.function not in engine.steps.functions_run:
            continue  # another step has ops of the same names
        if any(op.type == SEGMENT for op in planned.graph.ops):
            raise LMSError(
                f"{planned.name} runs in segments that XLA compiles, whose ops have no times; "
                "measure it with xla='off'"
            )
        # A GPU's kernels are named by the ops of a loop's body: the time of the loop stays an estimate.
        ops = [op for op in planned.unedited.ops if not (on_gpu and op.type in BODY_ATTRS)]
        found = (gpu_seconds if on_gpu else cpu_seconds)(events, frozenset(op.name for op in ops))
        if found:
            path = engine.resources.profiles().keep(planned.unedited, found)
            total_s = sum(found.values())
            alike = sum(one.name == planned.name for one in steps) > 1
            name = f"{planned.name} ({planned.function})" if alike else planned.name
            kept[name] = f"{len(found):,} ops measured, {1000 * total_s:,.1f} ms a step, in {path}"
    if not kept:
        raise LMSError(
            "no training step ran in the with block of lms.profile(); needed one that LMS has looked at, "
            "such as three steps of fit()"
        )
    return kept
