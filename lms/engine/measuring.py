"""Keep the measured times of the steps that an engine has planned."""

import os
import platform
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import tensorflow as tf

from lms.device.device import Device
from lms.errors import LMSError
from lms.ir.graph import Graph
from lms.planner.segments import SEGMENT
from lms.profiling.op_trace import op_seconds
from lms.profiling.store import Profiles, profile_folder

if TYPE_CHECKING:
    from lms.engine.engine import Engine

LEAST_SHARE = 0.2
"""The share of a step's ops that must have run in the profile for it to be of that step."""
CPU_INFO = Path("/proc/cpuinfo")


def profiles_of(device: Device, environ: Mapping[str, str], warn: Callable[[str], None]) -> Profiles:
    """Return the profiles of this machine's CPU device; none of a GPU, which is not measured."""
    folder = profile_folder(environ) if device.type == "CPU" else None
    intra = tf.config.threading.get_intra_op_parallelism_threads()
    inter = tf.config.threading.get_inter_op_parallelism_threads()
    return Profiles(
        folder,
        (
            device.name,
            _processor(),
            f"{len(os.sched_getaffinity(0))} CPUs",
            f"{intra} and {inter} threads",
            f"TensorFlow {tf.__version__}",
        ),
        warn,
    )


def _processor() -> str:
    """Return the model of the processor, or its architecture where the kernel tells no more."""
    try:
        lines = CPU_INFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "cpu\t")))
    return next(named, platform.machine())


def require_cpu(engine: "Engine") -> None:
    """Check that the engine's device can be profiled.

    Raises:
        LMSError: If it is a GPU.
    """
    name = engine.resources.devices[0].name
    if engine.resources.devices[0].type != "CPU":
        raise LMSError(
            f"lms.profile() measures the CPU device, and steps run on {name} here; hide the GPUs to measure "
            "(CUDA_VISIBLE_DEVICES=-1), or leave the profile out: plans then use estimates"
        )


def keep(engine: "Engine", trace: bytes) -> dict[str, str]:
    """Keep the times of all planned steps that a trace holds; return a line for each.

    Raises:
        LMSError: If the trace holds none, or the times cannot be kept.
    """
    measured = op_seconds(trace)
    engine.report()  # has steps read that fit
    kept: dict[str, str] = {}
    for planned in engine.books.collector.planned.values():
        if any(op.type == SEGMENT for op in planned.graph.ops):
            raise LMSError(
                f"{planned.name} runs in segments that XLA compiles, whose ops have no times; "
                "measure it with xla='off'"
            )
        found = _of_step(planned.unedited, measured)
        if found:
            path = engine.resources.profiles().keep(planned.unedited, found)
            total_s = sum(found.values())
            kept[planned.name] = f"{len(found):,} ops measured, {1000 * total_s:,.1f} ms a step, in {path}"
    if not kept:
        raise LMSError(
            "no training step ran in the with block of lms.profile(); needed one that LMS has looked at, "
            "such as three steps of fit()"
        )
    return kept


def _of_step(graph: Graph, measured: Mapping[str, float]) -> dict[str, float]:
    """Return the times of a step's ops; empty where too few of them ran."""
    found = {op.name: measured[op.name] for op in graph.ops if op.name in measured}
    return found if len(found) >= LEAST_SHARE * len(graph.ops) else {}
