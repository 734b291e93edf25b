"""Take a traced training step for a forecast in place of running it."""

import json
import os
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from lms.device.device import Device
from lms.device.kernels import Gpu as GpuKernels
from lms.device.link_speed import costs_of_device
from lms.device.memory_pool import PoolClaim
from lms.engine.early_build import build_early
from lms.engine.passes import variables_known
from lms.engine.work import Task, place_of
from lms.errors import LMSError
from lms.forecast.forecaster import Forecast, Forecaster, Target
from lms.forecast.step import TracedStep
from lms.optimizer.grappler_item import Output
from lms.reader.node_table import NodeTable
from lms.reader.shapes import ShapeHints, complete_shapes
from lms.reader.step_reader import read_step
from lms.reader.survey import Place, constant_bytes, step_frames
from lms.rewriter.streamable import find_variables
from lms.simulate.cost_model import costs_of
from lms.simulate.devices import GPUS, HERE, USABLE, known_as

STOPPED = "lms.estimate: this step is traced, not run"
"""In the message of the error with which such a step ends."""
FILE_VARIABLE = "LMSRUN_FIT"
"""Where the first traced step is written in a process that ``lmsrun fit`` has started; it ends then."""
GPUS_VARIABLE = "LMSRUN_FIT_GPUS"
"""The GPUs to forecast it for, as JSON: names, and what is known of those of a saved topology."""

UNKNOWN = (
    "that GPU's own kernels, fusions and layouts: those here are of the machine that traced the step",
    "scratch memory of cuDNN, CUDA's context beyond 6% of the memory, and exchanges between ranks",
    "measured times: these are by data sheets (half of the arithmetic, 75% of memory and link)",
)
"""What a forecast does not know."""
FIXED_BATCH = (
    "what grows with the batch, whose size the trace has fixed: taken is what depends on the data and has a "
    "multiple of it as its first size"
)
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
            per = f"{largest_s / batch * 1000:.2f}" if largest_s and batch else "-"
            rows.append(
                (
                    gpu["gpu"],
                    one["mode"],
                    "?" if batch is None else f"{'more than ' if one['is_more'] else ''}{batch:,}",
                    f"{one['peak_bytes'] / mib:,.0f}",
                    "yes" if one["fits"] else "no",
                    f"{one['step_s'] * 1000:,.1f}",
                    per,
                )
            )
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    for row in rows:
        lines.append("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())
    bounds = {one["mode"]: one["bound"] for gpu in found["gpus"] for one in gpu["modes"] if one["bound"]}
    lines += [f"{mode}: worked out, not planned: {bound}" for mode, bound in bounds.items()]
    lines += [f"not known: {text}" for text in found["unknown"]]
    return "\n".join(lines)


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
    return Estimate(name, step, tuple(found))


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
            found = {"fault": reason_of(step)}
        else:
            wanted = [one if isinstance(one, str) else named_gpu(**one) for one in json.loads(gpus)]
            made = estimate_step(name, step, wanted, here)
            found = {**made.to_json(), "text": str(made)}
        try:
            Path(path).write_text(json.dumps(found), encoding="utf-8")
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(0)  # whatever the program would do next, it must not train

    return write_and_end


def reason_of(fault: Exception) -> str:
    """Return in one line why a step cannot be forecast."""
    return " ".join(f"{type(fault).__name__}: {fault}".split())


def trace(task: Task, graph_def: Any, device: Device) -> tuple[TracedStep, Here | None] | None:
    """Read a graph that TensorFlow is about to run; ``None`` where it holds no training step."""
    table = NodeTable.of(graph_def)
    frames = step_frames(table, is_body=task.is_body)
    if not frames:
        return None
    raw = task.request.item.output_properties(table.names)
    batch = batch_of(task.hints)
    places = [Place(device.holds, GpuKernels((8, 0), False, True))]
    if device.limit_bytes is not None:
        places.append(place_of(device, os.environ))
    fetches = task.request.item.fetches()
    outputs = complete_shapes(graph_def, table, raw, task.hints)
    known = variables_known(table, task.inputs)
    doubled, is_fixed = None, False
    if batch is not None:
        doubled = complete_shapes(graph_def, table, raw, _with_batch(task.hints, batch, 2 * batch))
        is_fixed = doubled == outputs
        if is_fixed:
            doubled = _grown(table, outputs, batch, {value.dims for value in known.values()})
    state = weights = largest = 0
    for nbytes, is_state in find_variables(table, outputs, known, device.holds, fetches):
        state += nbytes if is_state else 0
        weights += 0 if is_state else nbytes
        largest = max(largest, 0 if is_state else nbytes)

    def read(place: Place) -> TracedStep:
        graph, other = (
            None if shapes is None else read_step(table, shapes, place, frames[0], fetches).graph
            for shapes in (outputs, doubled)
        )
        assert graph is not None  # noqa: S101 - its shapes are known
        constants = constant_bytes(table, outputs, place)
        return TracedStep(graph, batch or 1, other, weights, state, largest, constants, is_fixed)

    step, *others = map(read, places)
    in_use, _ = device.memory() or (0, 0)
    here = Here(others[0], device, max(in_use, weights + state)) if others else None
    return step, here


def batch_of(hints: ShapeHints) -> int | None:
    """Return the batch that a call tells."""
    if hints.batch_size is not None:
        return hints.batch_size
    shapes = [*hints.batches, *hints.arguments.values()]
    return next((shape[0] for shape in shapes if shape), None)


def _grown(
    table: NodeTable, outputs: Sequence[Sequence[Output]], batch: int, weights: Collection[Any]
) -> list[list[Output]]:
    """Return the shapes for twice the batch of a graph that has its size in it.

    What depends on the data and has a multiple of the batch as its first size is taken to grow with it. What
    has the shape of a variable is a gradient, and does not.
    """
    fed: set[int] = set()
    grown: list[list[Output]] = [list(made) for made in outputs]
    for node in table.order:
        is_data = table.types[node] in ("_Arg", "IteratorGetNext", "Placeholder")
        if not is_data and fed.isdisjoint(source.node for source in table.inputs[node]):
            continue
        for index, one in enumerate(outputs[node]):
            dims = one.dims
            if dims and dims[0] > 0 and dims[0] % batch == 0 and (is_data or dims not in weights):
                grown[node][index] = Output(one.dtype, (2 * dims[0], *dims[1:]))
        if not is_data or grown[node] != list(outputs[node]):
            fed.add(node)
    return grown


def _with_batch(hints: ShapeHints, batch: int, wanted: int) -> ShapeHints:
    def changed(shape: Sequence[int]) -> tuple[int, ...]:
        return (wanted, *shape[1:]) if shape and shape[0] == batch else tuple(shape)

    return replace(
        hints,
        arguments={number: changed(shape) for number, shape in hints.arguments.items()},
        batches=tuple(changed(shape) for shape in hints.batches),
        batch_size=None if hints.batch_size is None else wanted,
    )
