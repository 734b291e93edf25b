"""Forecast a traced step on devices, and say so as a table or as plain values."""

import json
import os
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from lms.device.device import Device
from lms.device.link_speed import costs_of_device
from lms.device.memory_pool import PoolClaim
from lms.errors import LMSError
from lms.estimates.early_build import build_early
from lms.forecast.forecaster import Forecast, Forecaster, Target
from lms.forecast.step import TracedStep
from lms.simulate.cost_model import costs_of
from lms.simulate.devices import GPUS, HERE, USABLE, known_as

FILE_VARIABLE = "LMSRUN_FIT"
"""Where the first traced step is written in a process that ``lmsrun fit`` has started; it ends then."""
ENDED_WITHIN_S = 10.0
"""Limits how long that process waits to be ended, with whatever has started it."""
GPUS_VARIABLE = "LMSRUN_FIT_GPUS"
"""The GPUs to forecast it for, as JSON: names, and what is known of those of a saved topology."""

UNKNOWN = (
    "that GPU's own kernels, fusions and layouts: those here are of the machine that traced the step",
    "scratch memory of cuDNN, CUDA's context beyond 6% of the memory, and exchanges between ranks",
    "measured times: those of an H100, H200 and GH200 go by an H100's kernels, others by data sheets",
)
"""What a forecast does not know."""
FIXED_BATCH = (
    "what grows with the batch, whose size the trace has fixed: taken is what depends on the data and has a "
    "multiple of it as its first size"
)
ERROR = 0.1
"""Bounds the distance of a forecast peak from the measured one of 19 in 20 (``docs/measurements.md``)."""
TIGHT = "tight"
IS_TIGHT = "fits by the forecast, but leaves less than 10% of the memory, as much as a forecast may be off"
IS_LARGEST = "fills the memory by the forecast, so the step may run out of memory; begin with a tenth less"
NO_BATCH = "the size of the batch: larger ones are not known; batch_size tells it"


@dataclass(frozen=True)
class Here:
    """The device that traced a step, and the step as the kernels of that device run it."""

    step: TracedStep
    device: Device
    in_use_bytes: int
    """Before the step, with its variables."""


class Traced(Protocol):
    """Is told the name of a step and what was read of it, or why it cannot be read."""

    def __call__(self, name: str, step: TracedStep | Exception, here: Here | None = None) -> None:
        """Take note of a step."""


@dataclass(frozen=True)
class Named:
    """A device to forecast for, with its name."""

    name: str
    target: Target


@dataclass(frozen=True)
class Estimate:
    """The forecasts of one step by GPU; prints as a table."""

    name: str
    step: TracedStep
    gpus: tuple[tuple[Named, tuple[Forecast, ...]], ...]

    @property
    def notes(self) -> tuple[str, ...]:
        """What is not known."""
        step = self.step
        return (*([NO_BATCH] if step.other is None else [FIXED_BATCH] if step.is_fixed else []), *UNKNOWN)

    def to_json(self) -> dict[str, Any]:
        """Return the same as plain values."""
        step = self.step
        return {
            "step": self.name,
            "ops": len(step.graph.ops),
            "batch": step.batch,
            "weights_bytes": step.weights_bytes,
            "state_bytes": step.state_bytes,
            "gpus": [
                {
                    "gpu": gpu.name,
                    "memory_bytes": gpu.target.limit_bytes,
                    "modes": [asdict(found) for found in forecasts],
                }
                for gpu, forecasts in self.gpus
            ],
            "unknown": list(self.notes),
        }

    def __str__(self) -> str:
        return render_estimate(self.to_json())


def _short(value: float) -> str:
    """Write a number with two digits behind the point, and one below a tenth with two that count."""
    return f"{value:,.2f}" if value >= 0.1 else f"{value:.2g}"


def render_estimate(found: Mapping[str, Any]) -> str:
    """Write an estimate as a table for people."""
    mib = 2**20
    weights, state = (f"{found[key] / mib:,.0f} MiB" for key in ("weights_bytes", "state_bytes"))
    traced = f"{found['step']}: {found['ops']:,} ops, traced with batch {found['batch']}"
    lines = [f"{traced}; weights {weights}, optimizer state {state}"]
    at = f"at {found['batch']}"
    sizes = ("largest batch", f"peak MiB {at}", f"fits {at}", f"step ms {at}")
    head = ("GPU", "mode", *sizes, "ms an example at the largest")
    rows = [head]
    for gpu in found["gpus"]:
        for one in gpu["modes"]:
            batch, largest_s = one["largest_batch"], one["largest_step_s"]
            per = _short(largest_s / batch * 1000) if largest_s and batch else "-"
            rows.append(
                (
                    gpu["gpu"],
                    one["mode"],
                    "?" if batch is None else f"{'more than ' if one['is_more'] else ''}{batch:,}",
                    f"{one['peak_bytes'] / mib:,.0f}",
                    _fits(one, gpu["memory_bytes"]),
                    f"{one['step_s'] * 1000:,.1f}",
                    per,
                )
            )
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    left = {0, 1, head.index(sizes[2])}
    for row in rows:
        cells = enumerate(zip(row, widths, strict=True))
        texts = (text.ljust(width) if at in left else text.rjust(width) for at, (text, width) in cells)
        lines.append("  ".join(texts).rstrip())
    bounds = {one["mode"]: one["bound"] for gpu in found["gpus"] for one in gpu["modes"] if one["bound"]}
    lines += [f"{mode}: worked out, not planned: {bound}" for mode, bound in bounds.items()]
    notes = {one["mode"]: one["note"] for gpu in found["gpus"] for one in gpu["modes"] if one["note"]}
    lines += [f"{mode}: {note}" for mode, note in notes.items()]
    if any(row[head.index(sizes[2])] == TIGHT for row in rows):
        lines.append(f"{TIGHT}: {IS_TIGHT}")
    if any(one["largest_batch"] and not one["is_more"] for gpu in found["gpus"] for one in gpu["modes"]):
        lines.append(f"largest batch: {IS_LARGEST}")
    lines += [f"not known: {text}" for text in found["unknown"]]
    return "\n".join(lines)


def _fits(mode: Mapping[str, Any], memory_bytes: int) -> str:
    """Tell in a word whether the traced batch fits."""
    if not mode["fits"]:
        return "no"
    return "yes" if mode["peak_bytes"] <= (1 - ERROR) * memory_bytes else TIGHT


def estimate_step(
    name: str, step: TracedStep, gpus: Iterable[str | Named], here: Here | None = None
) -> Estimate:
    """Forecast a traced step on GPUs.

    Args:
        name: The step's.
        step: As the kernels of GPUs run it.
        gpus: By their names in the table; :data:`HERE`; or what is known of others.
        here: The device that traced it, where its memory is known.

    Raises:
        LMSError: If the device here is asked for, and not known.
    """
    wanted = [one if isinstance(one, Named) else _named(one, here) for one in gpus]
    others = [one.target for one in wanted if one.name != HERE]
    forecasters = {False: Forecaster(step, others)} if others else {}
    if here is not None and len(others) < len(wanted):
        forecasters[True] = Forecaster(here.step, [one.target for one in wanted if one.name == HERE])
    found = [(one, tuple(forecasters[one.name == HERE].forecasts(one.target))) for one in wanted]
    return Estimate(name, replace(step, with_variables_moved=None), tuple(found))  # which holds the graph


def _named(name: str, here: Here | None) -> Named:
    if name != HERE:
        gpu = GPUS[name]
        return Named(name, Target(gpu.limit_bytes, gpu.costs, gpu.half_costs))
    if here is None or here.device.limit_bytes is None:
        raise LMSError(
            "the memory of the device here is not known; needed a GPU, or a limit of the CPU device "
            "(TF_CPU_ALLOCATOR_USE_BFC=true TF_CPU_BFC_MEM_LIMIT_IN_MB=N), or the name of another GPU"
        )
    costs = costs_of_device(here.device, None)
    if PoolClaim(os.environ).leaves_growing(here.device.type):
        costs = replace(costs, resident_bytes=here.in_use_bytes)
    limit, kind = here.device.limit_bytes, here.device.type
    return Named(HERE, Target(limit, costs, costs, kind, here.in_use_bytes))


def named_gpu(name: str, model: str, memory_bytes: int, machine: str) -> Named:
    """Return a GPU of another machine.

    Args:
        name: For the table.
        model: What the driver calls it.
        memory_bytes: Its memory.
        machine: The processor's architecture there.
    """
    gpu = known_as(model)
    link = costs_of("GPU", None if gpu is None else gpu.capability, model, machine)
    limit = int(memory_bytes * USABLE)
    if gpu is None:
        return Named(name, Target(limit, link, link))
    costs, half = gpu.costs, gpu.half_costs
    if machine == "ppc64le":
        costs, half = (one.with_link(link.out_bytes_per_s) for one in (costs, half))
    return Named(name, Target(limit, costs, half))


def told_to(environ: Mapping[str, str]) -> Traced | None:
    """Return what becomes of the first traced step in a process of ``lmsrun fit``; ``None`` elsewhere."""
    path, gpus = environ.get(FILE_VARIABLE), environ.get(GPUS_VARIABLE, "")
    if not path:
        return None
    build_early()

    def write_and_end(name: str, step: TracedStep | Exception, here: Here | None = None) -> None:
        if isinstance(step, Exception):
            found = {"fault": reason_of(step), "is_own": isinstance(step, LMSError)}
        else:
            wanted = [one if isinstance(one, str) else named_gpu(**one) for one in json.loads(gpus)]
            made = estimate_step(name, step, wanted, here)
            found = {**made.to_json(), "text": str(made)}
        try:
            draft = Path(f"{path}.{os.getpid()}")
            draft.write_text(json.dumps(found), encoding="utf-8")
            with suppress(OSError):  # whatever cannot be cleaned up
                _remove_generated_code()
                sys.stdout.flush()
                sys.stderr.flush()
            draft.replace(path)
            time.sleep(ENDED_WITHIN_S)
        finally:
            os._exit(1)  # whatever the program would do next, it must not train

    return write_and_end


def _remove_generated_code() -> None:
    """Remove the files of AutoGraph's code, as TensorFlow does at a process's usual end."""
    for name, module in [*sys.modules.items()]:
        if not name.startswith("__autograph_generated_file"):
            continue
        for path in filter(None, (module.__file__, module.__cached__)):
            Path(path).unlink(missing_ok=True)
        if module.__cached__:
            with suppress(OSError):  # it holds those of others
                Path(module.__cached__).parent.rmdir()


def reason_of(fault: Exception) -> str:
    """Return in one line why a step cannot be forecast."""
    if isinstance(fault, LMSError):
        return " ".join(str(fault).split())
    return " ".join(f"{type(fault).__name__}: {fault}".split())
