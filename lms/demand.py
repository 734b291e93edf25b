"""What a planned step asks of the device's allocator, and what it leaves there for the next step."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from lms.liveness import Buffers, Residency, positions, round_up, timeline
from lms.swap_plan import Swap

COPYING_UPDATES = ("AssignAddVariableOp", "AssignSubVariableOp", "ResourceApply")
"""How the types of ops begin that write a variable in place, or into a copy while others still read it."""


class Update(NamedTuple):
    """A variable that gets another chunk of memory: at ``point``, which its old one outlives to ``freed``."""

    point: int
    variable: int
    """The tensor of its handle."""
    nbytes: int
    source: int | None
    """The buffer that becomes the variable's; ``None``: a copy, allocated anew."""
    freed: int


@dataclass(frozen=True)
class Demand:
    """The allocations of one step, in points (see :class:`lms.liveness.Timeline`)."""

    stays: tuple[Residency, ...]
    """Buffers and scratch."""
    updates: tuple[Update, ...] = ()
    handed_on: Mapping[int, int] = field(default_factory=dict)
    """By the buffer that a kernel makes in place the buffer whose chunk it keeps."""

    @classmethod
    def of(cls, buffers: Buffers, order: Sequence[int], swaps: Sequence[Swap] = ()) -> "Demand":
        """The demand of a step that runs in ``order`` with ``swaps``."""
        stays, position = timeline(buffers, order, swaps).residencies, positions(order)
        scratch = tuple(
            Residency(-1 - op, round_up(buffers.graph.ops[op].workspace_bytes), *[2 * position[op]] * 2)
            for op in buffers.with_workspace
        )
        end = {stay.tensor: stay.last for stay in stays}  # the last stay of a buffer comes last
        return cls(
            stays + scratch,
            tuple(_updates(buffers, position)),
            {out: source for op in order for out, source in _in_place(buffers, op, 2 * position[op], end)},
        )


def _in_place(buffers: Buffers, op: int, point: int, end: Mapping[int, int]) -> Iterator[tuple[int, int]]:
    """The output that ``op`` makes in place and its source: the one that ends just before the op runs."""
    node, graph = buffers.graph.ops[op], buffers.graph
    for slot in node.in_place:
        source = graph.roots[node.inputs[slot]]
        if end.get(source) == point - 1 and buffers.nbytes[source] == buffers.nbytes[node.outputs[0]]:
            yield node.outputs[0], source
            return


def _updates(buffers: Buffers, position: Sequence[int]) -> Iterator[Update]:
    """Every update of the step that moves its variable."""
    graph = buffers.graph
    last_read: dict[int, int] = {}
    size: dict[int, int] = {}
    for op in graph.ops:
        if op.type == "ReadVariableOp":
            variable, value = graph.roots[op.inputs[0]], op.outputs[0]
            readers = [2 * position[reader] for reader in buffers.users[graph.roots[value]]]
            last_read[variable] = max([last_read.get(variable, 0), *readers])
            size[variable] = round_up(graph.tensors[value].nbytes or 0)
    for op in graph.ops:
        if op.type == "AssignVariableOp":
            variable, source = graph.roots[op.inputs[0]], graph.roots[op.inputs[1]]
            point = 2 * position[op.id]
            if buffers.nbytes[source]:
                freed = max(point, last_read.get(variable, 0))
                yield Update(point, variable, buffers.nbytes[source], source, freed)
        elif op.type.startswith(COPYING_UPDATES):
            variable, point = graph.roots[op.inputs[0]], 2 * position[op.id]
            if last_read.get(variable, 0) > point:
                yield Update(point, variable, size[variable], None, last_read[variable])
