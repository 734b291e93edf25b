"""What a planned step asks of the device's allocator, and what it leaves there for the next step."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from lms.liveness import Buffers, Residency, round_up, timeline
from lms.swap_plan import Swap


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
        stays, placed = timeline(buffers, order, swaps).residencies, buffers.placement(order)
        scratch = tuple(
            Residency(-1 - op, nbytes, point, point)
            for op, (point, nbytes) in zip(buffers.with_workspace, placed.scratch, strict=True)
        )
        ends = {stay.tensor: stay.last for stay in stays}  # the last stay of a buffer comes last
        handed_on = {
            buffers.graph.ops[op].outputs[0]: source
            for source, op in placed.takers.items()
            if ends[source] == 2 * placed.position[op] - 1
        }
        return cls(stays + scratch, tuple(_updates(buffers, placed.position)), handed_on)


def _updates(buffers: Buffers, position: Sequence[int]) -> Iterator[Update]:
    """Every update of the step that moves its variable."""
    graph = buffers.graph
    last_read: dict[int, int] = {}
    size: dict[int, int] = {}
    for op in buffers.with_variables:
        if op.type == "ReadVariableOp":
            variable, value = graph.roots[op.inputs[0]], op.outputs[0]
            readers = [2 * position[reader] for reader in buffers.users[graph.roots[value]]]
            last_read[variable] = max([last_read.get(variable, 0), *readers])
            size[variable] = round_up(graph.tensors[value].nbytes or 0)
    for op in buffers.with_variables:
        if op.type == "AssignVariableOp":
            variable, source = graph.roots[op.inputs[0]], graph.roots[op.inputs[1]]
            point = 2 * position[op.id]
            if buffers.nbytes[source]:
                freed = max(point, last_read.get(variable, 0))
                yield Update(point, variable, buffers.nbytes[source], source, freed)
        elif op.type != "ReadVariableOp":
            variable, point = graph.roots[op.inputs[0]], 2 * position[op.id]
            if last_read.get(variable, 0) > point:
                yield Update(point, variable, size[variable], None, last_read[variable])
