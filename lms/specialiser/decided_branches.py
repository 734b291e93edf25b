"""Take the conditions out of a graph that its call decides: their branches become part of the step.

Without that most of a step may lie under conditions: each batch normalization and each dropout of a script
that feeds ``is_training``. What a condition may leave out is hard to move to the host in time, and the
tensors that a branch keeps for the backward pass get there in optionals, whose bytes nobody knows.

The branch that is not taken goes. A ``Switch`` hands on what it reads, a ``Merge`` the only input left to it,
and what is got from an optional is what was put into it: their readers read that, and wait for what these
have waited for. The ops that compute stay the same.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import graph_pb2, node_def_pb2

from lms.ir.op_traits import MERGES
from lms.optimizer.grappler_item import Output
from lms.reader.node_table import SWITCHES, TURNS, NodeTable, Source
from lms.specialiser.known_predicates import DEFAULT, PARTING, known_predicates
from lms.specialiser.new_nodes import INT32, constant, shape_of, turn_into_fill

PUT, GOT = "OptionalFromValue", "OptionalGetValue"
ZEROS = "ZerosLike"
"""The type of the op that makes zeros of what is in an optional: its gradient."""


def may_decide(graph_def: Any, predicates: Mapping[str, bool]) -> bool:
    """Tell whether a call may decide conditions of a session's graph, at first sight."""
    return bool(predicates) or any(node.op == DEFAULT for node in graph_def.node)


@dataclass(frozen=True)
class Taken:
    """A graph without the conditions that are known."""

    graph_def: Any
    outputs: Mapping[str, list[Output]]
    """Type and shape of what new nodes make, by their names."""
    like: Mapping[str, str]
    """The nodes that make zeros now, each with the output whose shape these have."""


def with_branches_taken(
    graph_def: Any,
    table: NodeTable,
    predicates: Mapping[str, bool],
    kept: Collection[str],
    fetches: Collection[str],
) -> Taken | None:
    """Return a session's graph without the conditions that are known; ``None`` where there are none.

    Args:
        graph_def: The graph; it is not changed.
        table: The graph as a table.
        predicates: Those that are fed, by the names of their nodes.
        kept: The names of the nodes that are fed, fetched or run.
        fetches: The names of the outputs that are fetched.
    """
    found = _Branches.taken(table, known_predicates(table, predicates))
    if not found.are_known or not found.may_be_taken(kept, fetches):
        return None
    made = graph_pb2.GraphDef(versions=graph_def.versions, library=graph_def.library)
    made.node.extend(found.written(kept))
    return Taken(made, found.outputs, found.like)


@dataclass
class _Branches:
    """Holds what becomes of the nodes of a graph."""

    table: NodeTable
    dead: set[int] = field(default_factory=set)
    """The nodes that never run."""
    never: set[Source] = field(default_factory=set)
    """The outputs of switches that never come."""
    passed: set[int] = field(default_factory=set)
    """The nodes whose readers read something else."""
    instead: dict[Source, Source] = field(default_factory=dict)
    """Maps an output to what is read in its place."""
    also: dict[Source, frozenset[int]] = field(default_factory=dict)
    """The nodes that the readers of an output wait for then, because those that handed it on did."""
    zeros: dict[str, Source] = field(default_factory=dict)
    """The names of nodes that get zeros from an optional, each with the tensor of whose shape these are."""
    outputs: dict[str, list[Output]] = field(default_factory=dict)
    """Type and shape of what new nodes make, by their names."""
    like: dict[str, str] = field(default_factory=dict)
    """The nodes that make zeros now, each with the output whose shape these have."""
    left: dict[int, list[Source]] = field(default_factory=dict)
    """Maps a merge to those of its inputs that are left."""

    @classmethod
    def taken(cls, table: NodeTable, predicates: Mapping[Source, bool]) -> "_Branches":
        """Follow a graph from its beginning with the predicates that are known."""
        found = cls(table)
        for node in table.order:
            op_type, read = table.types[node], table.inputs[node]
            if op_type in MERGES:
                found._merge(node)
            elif any(map(found._is_never, read)) or not found.dead.isdisjoint(table.controls[node]):
                found.dead.add(node)
            elif op_type in PARTING and read[1] in predicates:
                taken = int(predicates[read[1]])
                found.never.add(Source(node, 1 - taken))
                found._pass(Source(node, taken), read[0], found._waits_of(read[1]))
            elif op_type == GOT:
                found._get(node)
        return found

    @property
    def are_known(self) -> bool:
        """Whether any branch is known."""
        return bool(self.never)

    def may_be_taken(self, kept: Collection[str], fetches: Collection[str]) -> bool:
        """Tell whether all that is wanted still runs, and nobody asks a merge which input it has taken."""
        table = self.table
        which = {Source(node, 1) for node in self.left}
        readers = (reader for node in self.left for reader, _ in table.readers[node])
        is_asked = any(not which.isdisjoint(table.inputs[reader]) for reader in readers)
        is_fetched = any(table.text(source) in fetches for source in which)
        return all(table.names[node] not in kept for node in self.dead) and not is_asked and not is_fetched

    def written(self, kept: Collection[str]) -> list[Any]:
        """Return the nodes that are left, with what they read and wait for."""
        table = self.table
        self.passed = {node for node in self.passed if table.names[node] not in kept}
        numbers = [one for one in range(len(table.nodes)) if one not in self.dead and one not in self.passed]
        nodes = [self._written(number) for number in numbers]
        shapes = [one for own in nodes if own.name in self.zeros for one in self._needs(own)]
        return [*nodes, *shapes]

    def _is_never(self, source: Source) -> bool:
        return source.node in self.dead or source in self.never

    def _pass(self, made: Source, read: Source, waits: Collection[int] = ()) -> None:
        """Have the readers of an output read what its node hands on.

        Not where that comes from a switch: it has run whichever of its outputs comes, so that it is nothing
        to wait for in place of the node.
        """
        first = self.instead.get(read, read)
        if self.table.types[first.node] in SWITCHES:
            return
        self.passed.add(made.node)
        self.instead[made] = first
        self.also[made] = self.also.get(read, frozenset()).union(self.table.controls[made.node], waits)

    def _waits_of(self, predicate: Source) -> set[int]:
        """Return what a switch has waited for by its predicate, which may wait for others."""
        node = self.instead.get(predicate, predicate).node
        waits = {*self.also.get(predicate, ())}
        return waits | ({node} if self.table.before[node] else set())

    def _merge(self, node: int) -> None:
        read = self.table.inputs[node]
        coming = [source for source in read if not self._is_never(source)]
        if all(self.table.types[source.node] in TURNS for source in coming):
            self.dead.add(node)
        elif len(coming) < len(read):
            self.left[node] = coming
            if len(coming) == 1:
                self._pass(Source(node, 0), coming[0])

    def _get(self, node: int) -> None:
        """Have what is got from an optional read where it was put in."""
        table = self.table
        optional, waits = self._maker(table.inputs[node][0])
        are_zeros = table.types[optional] == ZEROS
        if are_zeros:
            optional, _ = self._maker(table.inputs[optional][0])
        held = table.inputs[optional]
        if table.types[optional] != PUT or table.frame[optional] != table.frame[node]:
            return
        if are_zeros:
            (dtype, *more) = table.nodes[node].attr["output_types"].list.type
            if not more and tf.as_dtype(dtype).is_floating:
                self.zeros[table.names[node]] = self.instead.get(held[0], held[0])
            return
        waits |= {*table.controls[optional]}
        for index, source in enumerate(held):
            self._pass(Source(node, index), source, waits)

    def _maker(self, source: Source) -> tuple[int, set[int]]:
        """Return the node that makes what others only hand on, and the nodes that these wait for."""
        waits = {*self.also.get(source, ())}
        node = self.instead.get(source, source).node
        if self.table.types[node] != "Identity":
            return node, waits
        maker, before = self._maker(self.table.inputs[node][0])
        return maker, waits.union(before, self.table.controls[node])

    def _waits(self, nodes: Iterable[int]) -> set[int]:
        """Return the nodes to wait for in place of ``nodes``."""
        found: set[int] = set()
        for node in nodes:
            if node in self.passed:
                read = self.left.get(node) or self.table.inputs[node]
                found |= self._waits([source.node for source in read] + list(self.table.controls[node]))
            elif node not in self.dead:
                found.add(node)
        return found

    def _written(self, node: int) -> Any:
        """Return a copy of a node, with what it reads and waits for now."""
        table, own = self.table, node_def_pb2.NodeDef()
        own.CopyFrom(table.nodes[node])
        read = self.left.get(node) or table.inputs[node]
        now = [self.instead.get(source, source) for source in read]
        waits = self._waits(frozenset(table.controls[node]).union(*(self.also.get(one, ()) for one in read)))
        if (*now,) != table.inputs[node] or waits != {*table.controls[node]}:
            del own.input[:]
            own.input.extend(table.text(source) for source in now)
            beside = waits.difference(one for one, _ in now)
            own.input.extend(f"^{table.names[one]}" for one in sorted(beside))
        if node in self.left:
            own.attr["N"].i = len(now)
        return own

    def _needs(self, own: Any) -> Iterator[Any]:
        """Have a node make the zeros itself that it got from an optional; yield the nodes that it needs.

        It reads a shape in place of a tensor, which is not kept for that.
        """
        dtype, like = own.attr["output_types"].list.type[0], self.table.text(self.zeros[own.name])
        shape = shape_of(f"{own.name}/lms_shape", like, dtype, own.device)
        zero = constant(f"{own.name}/lms_zero", tf.make_tensor_proto(0, tf.as_dtype(dtype)), own.device)
        waits = [text[1:] for text in own.input if text[0] == "^"]
        turn_into_fill(own, shape.name, zero.name, dtype, waits)
        self.outputs |= {shape.name: [Output(INT32, (-1,))], zero.name: [Output(dtype, ())]}
        self.like[own.name] = like
        yield from (shape, zero)
