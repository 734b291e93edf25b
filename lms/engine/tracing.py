"""Read a training step for a forecast in place of running it."""

import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tensorflow.core.framework import graph_pb2

from lms.device.device import Device
from lms.device.kernels import Gpu as GpuKernels
from lms.errors import LMSError
from lms.estimates.estimating import Here
from lms.forecast.step import TracedStep
from lms.ir.graph import GraphError
from lms.optimizer.grappler_item import Output
from lms.passes.holding import hold
from lms.passes.parsing import kept_nodes
from lms.passes.streaming import variables_known
from lms.passes.work import Task, place_of
from lms.reader.node_table import ROOT, NodeTable
from lms.reader.shapes import ShapeHints, complete_shapes
from lms.reader.step_reader import read_step
from lms.reader.survey import Place, constant_bytes, step_frames
from lms.rewriter.stacking import find_stackable, find_zeros, stack_lists
from lms.rewriter.streamable import find_variables
from lms.rewriter.streaming import stream_variables
from lms.rewriter.validation import require_same_pairs
from lms.transports.base import write_copy
from lms.variables.host_values import ASSIGN, READ, write_variable_op

logger = logging.getLogger("lms")

STOPPED = "lms.estimate: this step is traced, not run"
"""In the message of the error with which such a step ends."""


@dataclass(frozen=True)
class _Graph:
    """A graph that TensorFlow is about to run, and its shapes for one batch and for twice as much."""

    graph_def: Any
    table: NodeTable
    shapes: tuple[Sequence[Sequence[Output]], ...]
    """The second is left out where the batch is not known."""
    known: Mapping[str, Output]
    """Type and shape of the variables, by the names of their nodes."""
    frame: int
    fetches: tuple[str, ...]

    def with_streams(
        self, shares: Mapping[bool, float], holds: Callable[[str], bool], least: int
    ) -> tuple["_Graph", int]:
        """Return the graph in which variables stream, and their bytes.

        Args:
            shares: How much streams of the bytes that only updates read (True), and of others.
            holds: Whether a node with this device name runs on the device.
            least: Smaller variables stay.
        """
        if self.frame != ROOT:
            return self, 0
        graph_def = graph_pb2.GraphDef()
        graph_def.CopyFrom(self.graph_def)
        table, drawn = NodeTable.of(graph_def), Drawn()
        streamed = stream_variables(
            *(graph_def, table, self.shapes[0], drawn, drawn, self.known),
            *(holds, shares.__getitem__, least, self.fetches),
        )
        edited = NodeTable.of(graph_def)
        before = [dict(zip(table.names, shapes, strict=True)) for shapes in self.shapes]
        shapes = tuple(
            [streamed.outputs.get(name) or one.get(name, ()) for name in edited.names] for one in before
        )
        return replace(self, graph_def=graph_def, table=edited, shapes=shapes), streamed.nbytes

    def with_lists_stacked(self, place: Place, least: int) -> "_Graph | None":
        """Return the graph in which the lists of its loops can be swapped; ``None`` where there is none.

        Args:
            place: The device that is planned.
            least: Smaller lists stay.
        """
        shapes: list[Sequence[Sequence[Output]]] = []
        graph_def, table = self.graph_def, self.table
        for known in self.shapes:
            graph_def = graph_pb2.GraphDef()
            graph_def.CopyFrom(self.graph_def)
            before = NodeTable.of(graph_def)
            found = find_stackable(before, known, self.frame, place, least) if self.frame == ROOT else []
            if not found:
                return None
            zeros = [*find_zeros(before, known, self.frame, place)]
            made = stack_lists(graph_def, before, found, zeros)
            table = NodeTable.of(graph_def)
            outputs = {**dict(zip(before.names, known, strict=True)), **made.outputs}
            shapes.append([outputs[name] for name in table.names])
        return replace(self, graph_def=graph_def, table=table, shapes=tuple(shapes))


class Drawn:
    """Writes the nodes of variables that stream into a graph that is planned and never runs."""

    def write_swap_out(self, node: Any, tensor: str, dtype: int, device: str) -> None:
        """Make ``node`` a copy to the host."""
        write_copy(node, "LmsSwapOut", tensor, dtype, device)

    def write_swap_in(self, node: Any, held: str, dtype: int, device: str) -> None:
        """Make ``node`` a copy to the device."""
        write_copy(node, "LmsSwapIn", held, dtype, device)

    def write_read(self, node: Any, handle: str, dtype: int, device: str) -> None:
        """Make ``node`` a read of a value in host memory."""
        write_variable_op(node, READ, [handle], dtype, device)

    def write_assign(self, node: Any, handle: str, value: str, dtype: int, device: str) -> None:
        """Make ``node`` an assignment of a value in host memory."""
        write_variable_op(node, ASSIGN, [handle, value], dtype, device)

    write_enter = write_assign


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
    fetches = tuple(task.request.item.fetches())
    outputs = complete_shapes(graph_def, table, raw, task.hints)
    known = variables_known(table, task.inputs)
    doubled, is_fixed = None, False
    if batch is not None:
        doubled = complete_shapes(graph_def, table, raw, _with_batch(task.hints, batch, 2 * batch))
        is_fixed = doubled == outputs
        if is_fixed:
            doubled = _grown(table, outputs, batch, {value.dims for value in known.values()})
    shapes = (outputs,) if doubled is None else (outputs, doubled)
    kept, least = kept_nodes(task, graph_def), task.config.min_tensor_bytes
    table, _ = hold(table, outputs, places[-1], frames[0], kept, least)
    graph = _Graph(graph_def, table, shapes, known, frames[0], fetches)
    state = weights = 0
    for nbytes, is_state in find_variables(table, outputs, known, device.holds, fetches):
        state += nbytes if is_state else 0
        weights += 0 if is_state else nbytes

    def read(place: Place, graph: _Graph = graph, moved_bytes: int = 0) -> TracedStep:
        steps = [read_step(graph.table, shapes, place, graph.frame, fetches) for shapes in graph.shapes]
        other = steps[1].graph if len(steps) > 1 else None
        constants = constant_bytes(graph.table, graph.shapes[0], place)
        moved = partial(with_variables_moved, place)
        step = TracedStep(steps[0].graph, batch or 1, other, weights, state, constants, is_fixed)
        return replace(step, moved_bytes=moved_bytes, with_variables_moved=None if moved_bytes else moved)

    def with_lists(place: Place) -> TracedStep:
        step, edited = read(place), graph.with_lists_stacked(place, least)
        return step if edited is None else replace(step, stacked=read(place, edited))

    def with_variables_moved(place: Place, of_state: float, of_weights: float) -> TracedStep | None:
        try:
            streamed, nbytes = graph.with_streams({True: of_state, False: of_weights}, device.holds, least)
            require_same_pairs(place.kernels, graph.table, streamed.table)
            return read(place, streamed, nbytes) if nbytes else None
        except (GraphError, LMSError) as error:  # a run keeps its variables on the device then, too
            logger.info("%s is forecast with its variables on the device: %s", task.name, error)
            return None

    step, *others = map(with_lists, places)
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
