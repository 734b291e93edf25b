"""The allocations that a planned step asks of the device, and what it leaves for the next step."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from heapq import heappop, heappush
from operator import attrgetter
from typing import NamedTuple

from lms.ir.assignments import ASSIGN, READ, VariableReads, in_place
from lms.ir.liveness import SMALL_BYTES, Buffers, Residency, round_up
from lms.ir.op_traits import may_end_step
from lms.ir.swap_plan import Filler, Swap


class Update(NamedTuple):
    """A variable that gets another chunk of memory: at ``point``, which its old one outlives to ``freed``."""

    point: int
    variable: int
    """The tensor of its handle."""
    nbytes: int
    source: int | None
    """The buffer that becomes the variable's too, whoever else holds it; ``None``: it is updated in place,
    which takes a copy where somebody still reads it or another variable has the same chunk."""
    freed: int


class Filled(NamedTuple):
    """A filler that takes memory at a point, before all else that is allocated there."""

    sizes: tuple[int, ...]
    """Bytes of what is allocated there."""
    least: int
    """The fewest bytes that it takes."""
    last: int
    """The last point at which they are taken."""


@dataclass(frozen=True)
class Demand:
    """The allocations of one step, in points (see :class:`lms.ir.liveness.Timeline`).

    Buffers of every size are listed: a momentum of 1 KiB keeps the free chunks at its sides apart.
    """

    stays: tuple[Residency, ...]
    """Buffers and scratch."""
    updates: tuple[Update, ...] = ()
    handed_on: Mapping[int, int] = field(default_factory=dict)
    """By the buffer that a kernel makes in place the buffer whose chunk it keeps."""
    resident_bytes: int | None = None
    """Where the device's pool grows region by region: the bytes in use before the step. Else ``None``."""
    fillers: Mapping[int, Filled] = field(default_factory=dict)
    """By the point at which something is allocated beside."""
    room_for_batches: tuple[int, ...] = ()
    """Bytes of each batch that there is room for (:attr:`lms.ir.swap_plan.SwapPlan.batches`)."""

    @classmethod
    def of(
        cls,
        buffers: Buffers,
        order: Sequence[int],
        swaps: Sequence[Swap] = (),
        resident_bytes: int | None = None,
        fillers: Sequence[Filler] = (),
        batches: int = 0,
        *,
        edited: bool = False,
    ) -> "Demand":
        """Return the demand of a step that runs in ``order`` with ``swaps``, computed once.

        With ``edited``, assignments keep variables in their places where they can.
        """
        order, swaps, fillers = tuple(order), tuple(swaps), tuple(fillers)
        found: Demand = buffers.once(
            (Demand, order, swaps, resident_bytes, edited),
            lambda: cls._of(buffers, order, swaps, resident_bytes, edited=edited),
        )
        if not fillers and not batches:
            return found
        return buffers.once(
            (Demand, order, swaps, resident_bytes, edited, fillers, batches),
            lambda: replace(
                found,
                fillers=filled(fillers, buffers.placement(order).position),
                room_for_batches=(batch_bytes(buffers),) * batches,
            ),
        )

    @classmethod
    def _of(
        cls,
        buffers: Buffers,
        order: tuple[int, ...],
        swaps: tuple[Swap, ...],
        resident_bytes: int | None,
        *,
        edited: bool,
    ) -> "Demand":
        timeline, placed = buffers.timeline(order, swaps), buffers.placement(order)
        stays = timeline.residencies
        scratch = tuple(
            Residency(-1 - op, nbytes, point, point)
            for op, (point, nbytes) in zip(buffers.with_workspace, placed.scratch, strict=True)
        )
        updates = buffers.once(
            (Update, order, edited), lambda: _planned_updates(buffers, order, edited=edited)
        )
        return cls(stays + scratch, updates, timeline.handed_on, resident_bytes)

    @cached_property
    def tape(self) -> "Tape":
        """The demand as calls of the allocator."""
        return Tape(self)

    @cached_property
    def peaks(self) -> dict[tuple[int, int, bool], int | None]:
        """The peaks found so far, by region size, number of steps and whether small buffers are pooled."""
        return {}

    @cached_property
    def rooms(self) -> dict[tuple[int, bool], int]:
        """The region sizes found so far, by the size at first and whether small buffers are pooled."""
        return {}

    @cached_property
    def borne(self) -> dict[tuple[int, int, int, int], bool]:
        """Note by the arguments of :func:`lms.simulate.rehearsal.bears_batches` what it has found so far."""
        return {}


def batch_bytes(buffers: Buffers) -> int:
    """Return the bytes of the large buffers of the batch that a step takes from an input pipeline."""
    made = (root for op in buffers.graph.ops if may_end_step(op.type) for root in op.outputs)
    return sum(buffers.nbytes[root] for root in made if buffers.nbytes[root] > SMALL_BYTES)


def filled(fillers: Iterable[Filler], position: Sequence[int]) -> dict[int, Filled]:
    """Return what fillers take, by the point at which it is allocated."""
    found: dict[int, Filled] = {}
    for one in fillers:
        point = 2 * position[one.op] + one.copies
        last = 2 * position[one.until] - 1 if one.copies else point
        found[point] = Filled(one.sizes, one.least, last)
    return found


def _planned_updates(buffers: Buffers, order: tuple[int, ...], *, edited: bool) -> tuple[Update, ...]:
    begins = [2 * place for place in buffers.placement(order).position]
    stay = in_place(buffers, order) if edited else ()
    return tuple(updates_of(buffers, VariableReads(buffers, begins), begins, stay))


def updates_of(
    buffers: Buffers, reads: VariableReads, begins: Sequence[int], stay: Collection[int]
) -> Iterator[Update]:
    """Find every update of the step that may move its variable.

    A variable that is assigned another's value shares its chunk, too. That is left out: it would take no more
    memory, and less between the two updates.

    Args:
        buffers: The step's.
        reads: When the step reads its variables.
        begins: For each op the point at which it begins.
        stay: The assignments that leave their variables in their places.
    """
    graph = buffers.graph
    moving: dict[int, int] = {}
    """By assignment the bytes that it moves."""
    moved: dict[int, int] = {}
    """The same by variable."""
    for op in buffers.with_variables:
        if op.type == ASSIGN and op.id not in stay:
            if nbytes := buffers.nbytes[graph.roots[op.inputs[1]]]:
                moving[op.id] = moved[reads.variable(op)] = nbytes
    size = {
        reads.variable(op): round_up(graph.tensors[op.outputs[0]].nbytes or 0)
        for op in buffers.with_variables
        if op.type == READ
    }
    for op in buffers.with_variables:
        variable, point = reads.variable(op), begins[op.id]
        read = reads.last(variable, point) or 0
        if op.id in moving:
            yield Update(point, variable, moving[op.id], graph.roots[op.inputs[1]], max(point, read))
        elif op.type not in (ASSIGN, READ):
            if read > point:
                yield Update(point, variable, size[variable], None, read)
            elif variable in moved:
                yield Update(point, variable, moved[variable], None, point)


_PLACE = attrgetter("point", "variable")
"""The order of updates; at the same point stays come first."""


class Fill(NamedTuple):
    """A filler takes memory between two calls of a tape: :meth:`lms.simulate.bfc_arena.Arena.take_rest`."""

    place: int
    """How many calls come before it."""
    register: int
    sizes: tuple[int, ...]
    least: int


class Tape:
    """A step as a list of calls of the allocator, computed once for all steps.

    Chunks are known by registers, which count who holds them. A variable has one for the chunk that it has
    when the step begins, and holds another for each chunk that it gets. Only the former can be one chunk for
    two registers: when a step has made two variables share it.
    """

    def __init__(self, demand: Demand) -> None:
        self.calls: list[tuple[int, int]] = []
        """Register and bytes of an allocation; register and 0: nothing holds it any more; register and
        negative bytes: its chunk is written to, and replaced by a copy of so many bytes where it is another's
        too."""
        self.tensors: dict[int, int] = {}
        """By register the buffer that it was allocated for; a variable's first one has none."""
        self.variables = {update.variable: update.nbytes for update in demand.updates if update.nbytes}
        """Bytes by variable; their registers come first, in this order."""
        self.handed: dict[int, list[tuple[int, int]]] = {}
        """By register the buffers to which kernels have handed its chunk on, each with the point of that."""
        self.points: dict[int, int] = {}
        """By register the point of its allocation; a variable's first one has none."""
        self.fills: list[Fill] = []
        """What fillers take, in the order of the calls."""
        self._fillers = dict(demand.fillers)
        self._latest = {variable: register for register, variable in enumerate(self.variables)}
        self.registers = len(self._latest)
        self._handed_on = demand.handed_on
        self._ends: list[tuple[int, int]] = []
        """Points at which a holder lets go of a register."""
        self._held: dict[int, tuple[int, int]] = {}
        """For each buffer on the device the last point of its stay, and its register."""
        self._holders = [1] * self.registers
        """By register how many hold it."""
        updates = sorted((one for one in demand.updates if one.nbytes), key=_PLACE, reverse=True)
        for stay in sorted((one for one in demand.stays if one.nbytes), key=self._begin):
            while updates and updates[-1].point < stay.first:
                self._update(updates.pop())
            self._stay(stay)
        while updates:
            self._update(updates.pop())
        self._free_before(None)
        self.moves = tuple(
            (register, latest) for register, latest in enumerate(self._latest.values()) if register != latest
        )
        """At the end of the step: a variable's register, and the one whose chunk it has now."""
        latest = [register for _, register in self.moves]
        self.shares = len(set(latest)) < len(latest)
        """Whether a step leaves variables that share a chunk."""

    @cached_property
    def small_bytes(self) -> int:
        """The most bytes that small buffers have at once."""
        sizes: dict[int, int] = {}
        used = most = 0
        for register, nbytes in self.calls:
            if not nbytes:
                used -= sizes.pop(register, 0)
            elif 0 < nbytes <= SMALL_BYTES:
                sizes[register] = nbytes
                used += nbytes
                most = max(most, used)
        return most

    def _begin(self, stay: Residency) -> tuple[int, bool, int, int]:
        """Return the sort key of a stay.

        Of the stays that begin at one point, one that takes a chunk over comes first: else its chunk would be
        free. Of copies back, which begin between two ops, the one that is needed first comes first.
        """
        rank = stay.needed if stay.first % 2 else stay.nbytes
        return stay.first, stay.tensor not in self._handed_on, rank, stay.tensor

    def _stay(self, stay: Residency) -> None:
        source = self._handed_on.get(stay.tensor)
        register = None if source is None else self._handed_from(source, stay.first)
        if register is None:
            self._free_before(stay.first)
            register = self._allocate(stay.nbytes, stay.first)
            self.tensors[register] = stay.tensor
        else:
            self.handed.setdefault(register, []).append((stay.first, stay.tensor))
        self._held[stay.tensor] = stay.last, register
        heappush(self._ends, (stay.last, register))

    def _handed_from(self, source: int, first: int) -> int | None:
        """Return the register that ``source`` hands to a stay that begins at ``first``, or None."""
        if source not in self._held:
            return None
        last, register = self._held[source]
        if last != first - 1:
            return None
        self._holders[register] += 1
        return register

    def _fill(self, filler: Filled, point: int) -> None:
        register = self._add_register(point)
        self.fills.append(Fill(len(self.calls), register, filler.sizes, filler.least))
        heappush(self._ends, (filler.last, register))

    def _update(self, update: Update) -> None:
        self._free_before(update.point)
        old = self._latest[update.variable]
        if update.source is not None:
            _, register = self._held[update.source]
            self._holders[register] += 1
        elif update.freed > update.point or self._holders[old] > 1:
            register = self._allocate(update.nbytes, update.point)
        else:
            if old < len(self._latest):
                self.calls.append((old, -update.nbytes))
            return
        heappush(self._ends, (update.freed, old))
        self._latest[update.variable] = register

    def _allocate(self, nbytes: int, point: int) -> int:
        if (filler := self._fillers.pop(point, None)) is not None:
            self._fill(filler, point)
        register = self._add_register(point)
        self.calls.append((register, nbytes))
        return register

    def _add_register(self, point: int) -> int:
        register = self.registers
        self.points[register] = point
        self.registers += 1
        self._holders.append(1)
        return register

    def _free_before(self, point: int | None) -> None:
        while self._ends and (point is None or self._ends[0][0] < point):
            _, register = heappop(self._ends)
            self._holders[register] -= 1
            if not self._holders[register]:
                self.calls.append((register, 0))
