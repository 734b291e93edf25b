"""Write the ops that a :class:`~lms.planner.recomputation.Recomputation` repeats into a GraphDef.

Ensures: the GraphDef and the returned step describe the same graph, so that a plan for the recomputation's
graph can be written into them like into those that were read.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lms.ir.op_traits import AGAIN
from lms.planner.recomputation import Recomputation
from lms.reader.node_table import MARK_ATTR, NodeTable, Source
from lms.reader.step_reader import Step
from lms.rewriter.writer import MARK, RewriteError, reference

ENDING = f"/{MARK}/{AGAIN}"
"""The end of the name of each node that repeats another."""


def write_repeats(graph_def: Any, step: Step, made: Recomputation) -> Step:
    """Add a node for each repeated op, let the backward pass read these, and return the step with them.

    Args:
        graph_def: The graph that ``step`` was read from.
        step: Its values, and the nodes behind them.
        made: A recomputation of ``step.graph``.

    Raises:
        RewriteError: If an op is to be repeated that is not one node; the graph is of no use then.
    """
    repeats = _Repeats(graph_def, step, made)
    for op in range(len(made.graph.ops)):
        if op in repeats.nodes:
            repeats.add(op)
        else:
            repeats.redirect(op)
    return repeats.step()


def repeated_node(name: str) -> str | None:
    """Return the name of the node that the node ``name`` repeats; ``None`` where it repeats none."""
    return name.removesuffix(ENDING) if name.endswith(ENDING) else None


class _Repeats:
    def __init__(self, graph_def: Any, step: Step, made: Recomputation) -> None:
        self._graph_def, self._step, self._made = graph_def, step, made
        self._table = step.table
        first = len(step.table.nodes)
        self.nodes: Mapping[int, int] = {op: first + count for count, op in enumerate(made.repeated)}
        """The node of each repeated op."""
        self._sources: list[Source | None] = [None] * len(made.tensors)
        self._inputs = list(step.table.inputs)
        self._controls = list(step.table.controls)
        self._names, self._types = list(step.table.names), list(step.table.types)

    def add(self, op: int) -> None:
        """Add the node of a repeated op."""
        made, table, step = self._made, self._table, self._step
        members, slots = step.members[made.ops[op]], step.slots[made.ops[op]]
        node = table.nodes[members[0]]
        if len(members) > 1 or len(slots) != len(table.inputs[members[0]]):
            raise RewriteError(f"{node.name} cannot be repeated: it is not one op with its own inputs")
        number = self.nodes[op]
        copy = self._graph_def.node.add(name=node.name + ENDING, op=node.op, device=node.device)
        for key, value in node.attr.items():
            copy.attr[key].CopyFrom(value)
        copy.attr[MARK_ATTR].s = AGAIN.encode()
        for index, tensor in enumerate(made.graph.ops[op].outputs):
            self._sources[tensor] = Source(number, index)
        self._names.append(copy.name)
        self._types.append(node.op)
        read = [self._source(tensor) for tensor in made.graph.ops[op].inputs]
        waits = [end for control in made.graph.ops[op].controls for end in step.ends[made.ops[control]]]
        copy.input.extend(reference(self._names[one.node], one.index) for one in read)
        copy.input.extend(f"^{self._names[wait]}" for wait in waits)
        self._inputs.append(tuple(read))
        self._controls.append(tuple(waits))

    def redirect(self, op: int) -> None:
        """Let an op read copies where the recomputation says so."""
        made, step = self._made, self._step
        old, new = step.graph.ops[made.ops[op]], made.graph.ops[op]
        for now, tensor in zip(new.outputs, old.outputs, strict=True):
            self._sources[now] = step.sources[tensor]
        for place, tensor in enumerate(new.inputs):
            if made.graph.tensors[tensor].op in self.nodes:
                source = self._source(tensor)
                node, slot = step.slots[made.ops[op]][place]
                self._table.nodes[node].input[slot] = reference(self._names[source.node], source.index)
                read = self._inputs[node]
                self._inputs[node] = (*read[:slot], source, *read[slot + 1 :])

    def _source(self, tensor: int) -> Source:
        source = self._sources[tensor]
        if source is None:
            raise RewriteError(f"{self._made.graph.tensor_name(tensor)} is no output of a node")
        return source

    def step(self) -> Step:
        """Return the step with the repeated ops."""
        made, step, table = self._made, self._step, self._table
        first = len(table.nodes)
        nodes = [*table.nodes, *list(self._graph_def.node)[first:]]
        edited = NodeTable(nodes, self._names, self._types, self._inputs, self._controls)

        def column(of: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
            return tuple(
                (self.nodes[op],) if op in self.nodes else of[source] for op, source in enumerate(made.ops)
            )

        slots = tuple(
            tuple((self.nodes[op], slot) for slot in range(len(made.graph.ops[op].inputs)))
            if op in self.nodes
            else step.slots[source]
            for op, source in enumerate(made.ops)
        )
        dtypes = dict(step.dtypes)
        for tensor, old in enumerate(made.tensors):
            source, known = self._sources[tensor], step.sources[old]
            if source is not None and known is not None:
                dtypes[source] = step.dtypes[known]
        return replace(
            step,
            graph=made.graph,
            table=edited,
            members=column(step.members),
            slots=slots,
            starts=column(step.starts),
            ends=column(step.ends),
            sources=tuple(self._sources),
            dtypes=dtypes,
        )
