"""The passes from a graph that TensorFlow is about to run to the edited one, in their order.

Each takes a :class:`~lms.engine.work.Work` and returns what it has come to. None of them changes the
graph but ``Writing``.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol

from tensorflow.core.framework import graph_pb2

from lms.device.horovod_fusion_buffer import FusionBuffer
from lms.device.link_speed import costs_of_device
from lms.device.small_buffer_pool import SmallPool
from lms.device.variable_memory import give_own_memory
from lms.engine.work import Residents, Work
from lms.ir.name_filters import select
from lms.optimizer.grappler_item import GrapplerItem, Output
from lms.planner.fragmentation import pool_bytes
from lms.planner.hybrid import decide
from lms.reader.node_table import ENTERS, NodeTable
from lms.reader.shapes import complete_shapes
from lms.reader.step_reader import constant_bytes, read_step
from lms.rewriter.decision import write_decision
from lms.rewriter.repeats import repeated_node
from lms.rewriter.validation import validate
from lms.rewriter.writer import MARK_ATTR
from lms.transports.base import Transport


class Pass(Protocol):
    """One pass over a graph."""

    @property
    def name(self) -> str:
        """The pass's name in the report of times."""

    def requires(self, work: Work) -> bool:
        """Tell whether the pass has anything to do."""

    def apply(self, work: Work) -> Work:
        """Return the work with what this pass adds to it."""


def run_passes(passes: Iterable[Pass], work: Work) -> Work:
    """Run and time those passes that find something to do."""
    for one in passes:
        if one.requires(work):
            began = time.perf_counter()
            work = one.apply(work)
            spent = work.seconds.get(one.name, 0.0) + time.perf_counter() - began
            work = replace(work, seconds={**work.seconds, one.name: spent})
    return work


class Parsing:
    """Reads the bytes that TensorFlow has handed over into a node table."""

    name = "parse"

    def requires(self, work: Work) -> bool:
        """Tell whether the bytes have not been read yet."""
        return work.table is None

    def apply(self, work: Work) -> Work:
        """Add the GraphDef and its node table."""
        graph_def = work.graph_def
        if graph_def is None:
            graph_def = graph_pb2.GraphDef.FromString(work.task.request.graph)
        fed = fed_nodes(work.task.request.item, graph_def)
        return replace(work, graph_def=graph_def, table=NodeTable.of(graph_def, fed))


class Shaping:
    """Has TensorFlow infer shapes, and completes them with what the call knows."""

    name = "shapes"

    def requires(self, work: Work) -> bool:
        """Tell whether shapes are not known yet."""
        return work.table is not None and len(work.outputs) < len(work.table.nodes)

    def apply(self, work: Work) -> Work:
        """Add the type and shape of each node's outputs."""
        assert work.table is not None  # noqa: S101 - Parsing went before
        if work.outputs:
            return replace(work, outputs=with_added(work.table, work.outputs))
        outputs = work.task.request.item.output_properties(work.table.names)
        completed = complete_shapes(work.graph_def, work.table, outputs, work.task.hints)
        return replace(work, outputs=completed)


def with_added(table: NodeTable, outputs: Sequence[Sequence[Output]]) -> Sequence[Sequence[Output]]:
    """Extend a graph's outputs to the nodes that an edit has added.

    These nodes repeat another one, or pass on what they read.
    """
    known = [*outputs, *([()] * (len(table.nodes) - len(outputs)))]
    for node in table.order:
        if node >= len(outputs):
            if (same := repeated_node(table.names[node])) is not None:
                known[node] = known[table.number[same]]
                continue
            read = [known[source.node][source.index] for source in table.inputs[node]]
            known[node] = read if table.types[node] == "IdentityN" else read[:1]
    return known


class Reading:
    """Reads the frame into values."""

    name = "read"

    def requires(self, work: Work) -> bool:
        """Tell whether a frame has been chosen."""
        return work.frame is not None

    def apply(self, work: Work) -> Work:
        """Add the frame as a step of plain values."""
        assert work.table is not None  # noqa: S101 - Parsing went before
        fetches = work.task.request.item.fetches()
        step = read_step(work.table, work.outputs, work.place, work.frame or 0, fetches)
        return replace(work, step=step)


class Filtering:
    """Marks the tensors that the configuration's filters keep on the device."""

    name = "filters"

    def requires(self, work: Work) -> bool:
        """Tell whether there is a step."""
        return work.step is not None

    def apply(self, work: Work) -> Work:
        """Add the graph with the filters applied, and the names that match nothing."""
        assert work.step is not None  # noqa: S101 - required
        selection = select(work.step.graph, work.task.config)
        return replace(work, graph=selection.graph, unmatched=selection.unmatched)


class Counting:
    """Counts the bytes on the device before the step, and gives each variable memory of its own."""

    name = "residents"

    def __init__(self, fusion: FusionBuffer) -> None:
        self._fusion = fusion

    def requires(self, work: Work) -> bool:
        """Tell whether there is a step."""
        return work.step is not None

    def apply(self, work: Work) -> Work:
        """Add the bytes that lie on the device when the step begins."""
        assert work.table is not None  # noqa: S101 - Parsing went before
        inputs = work.task.inputs
        pending = give_own_memory(inputs, set(_changed_arguments(work.table)))
        in_use, _ = work.device.memory() or (0, 0)
        exchanges = zip(work.table.types, map(len, work.table.inputs), strict=True)
        residents = Residents(
            in_use,
            tuple(pending),
            constant_bytes(work.table, work.outputs, work.place),
            self._fusion.pending_bytes(exchanges, work.device.type, in_use),
        )
        return replace(work, residents=residents)


class Planning:
    """Decides which tensors are swapped."""

    name = "plan"

    def __init__(self, bandwidth_gb_s: float | None) -> None:
        self._bandwidth_gb_s = bandwidth_gb_s

    def requires(self, work: Work) -> bool:
        """Tell whether there is a step."""
        return work.graph is not None

    def apply(self, work: Work) -> Work:
        """Add the plan."""
        assert work.graph is not None  # noqa: S101 - required
        costs = costs_of_device(work.device, self._bandwidth_gb_s)
        config, kind = work.task.config, work.device.type
        return replace(work, decision=decide(work.graph, config, kind, work.limit_bytes, costs))


class Writing:
    """Writes the plan into the graph."""

    name = "write"

    def __init__(self, transport: Callable[[], Transport], pool: SmallPool) -> None:
        self._transport, self._pool = transport, pool

    def requires(self, work: Work) -> bool:
        """Tell whether the plan changes anything."""
        return work.decision is not None and not work.decision.plan.is_empty

    def apply(self, work: Work) -> Work:
        """Write the plan's nodes into the GraphDef, and make the pool for small buffers."""
        assert work.decision is not None and work.step is not None  # noqa: S101 - required
        decided, transport = work.decision, self._transport()
        transport.require_room(decided.plan.bytes_out)
        edits = write_decision(work.graph_def, work.step, decided, transport)
        small = pool_bytes(decided.case.buffers, decided.plan, work.limit_bytes)
        self._pool.make(small, work.device.name, work.residents.pending)
        return replace(work, edits=edits)


class Validating:
    """Checks the edited graph, for TensorFlow would silently run a step with a bad one unoptimized."""

    name = "validate"

    def requires(self, work: Work) -> bool:
        """Tell whether the graph was changed."""
        return work.edits is not None

    def apply(self, work: Work) -> Work:
        """Raise an error if the edited graph is not valid."""
        assert work.table is not None and work.edits is not None  # noqa: S101 - required
        validate(work.graph_def, work.table, work.outputs, work.edits.nodes, work.place.kernels)
        return work


def fed_nodes(item: GrapplerItem, graph_def: Any) -> set[str]:
    """Return the nodes in whose place a session feeds values.

    They are the nodes that TensorFlow must preserve and does not fetch. A function has arguments instead, and
    there the preserved nodes are those with effects.
    """
    if any(node.op == "_Arg" for node in graph_def.node):
        return set()
    return set(item.preserved()) - {fetched.partition(":")[0] for fetched in item.fetches()}


def is_edited(graph_def: Any) -> bool:
    """Tell whether a graph holds nodes of an earlier edit."""
    return any(MARK_ATTR in node.attr for node in graph_def.node)


def _changed_arguments(table: NodeTable) -> Iterator[int]:
    """Yield the numbers of the arguments that a graph does more with than read them."""
    for node, op_type in enumerate(table.types):
        if op_type == "_Arg" and any(one != "ReadVariableOp" for one in _uses(table, node)):
            yield table.nodes[node].attr["index"].i


def _uses(table: NodeTable, node: int) -> Iterator[str]:
    """Yield the types of the ops that read a node, also inside of loops."""
    for reader, _ in table.readers[node]:
        if table.types[reader] in ENTERS:
            yield from _uses(table, reader)
        else:
            yield table.types[reader]


def standard_passes(
    counting: Counting, transport: Callable[[], Transport], pool: SmallPool, bandwidth_gb_s: float | None
) -> Sequence[Pass]:
    """Return the passes over each frame and device, in their order."""
    return (
        Parsing(),
        Shaping(),
        Reading(),
        Filtering(),
        counting,
        Planning(bandwidth_gb_s),
        Writing(transport, pool),
        Validating(),
    )
