"""The value that all policies work on: an order, its chain of big ops as numbered steps, and trips.

Policies think in steps only. Step ``s`` is op ``chain[s]``; memory is looked at in points, ``2 * s + 1``
while step ``s`` runs and ``2 * s`` before it (with all the small ops there), so that ``2 * steps`` is the
end.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from lms.ir.graph import Use
from lms.ir.liveness import Buffers, Timeline
from lms.ir.swap_plan import SerialEdge, Swap, SwapIn
from lms.schedule.op_order import serial_edges


class Trip(NamedTuple):
    """One absence of a buffer from the device.

    The device reads it in step ``left`` for the last time before and in step ``back`` for the first time
    after. Step ``freed`` waits until the copy to the host is done (``None``: no step waits); the copy back
    may start once step ``trigger`` is done. ``left < freed <= trigger < back``.
    """

    tensor: int
    left: int
    back: int
    trigger: int
    freed: int | None = None
    awaited: int | None = None
    """A step that waits for the copy back although it does not read it (``sync_mode``)."""


@dataclass(frozen=True)
class Schedule:
    """An order of the ops, its big ones as steps, and when each buffer that may be swapped is in use."""

    buffers: Buffers
    order: tuple[int, ...]
    chain: tuple[int, ...]
    candidates: tuple[int, ...]
    """Buffers that may be swapped; all their readers are steps."""
    copies_at_once: bool = False
    """Whether a copy to the host frees its buffer as soon as it is done, as on a CPU device; else the buffer
    is held until a step of the plan."""

    @classmethod
    def of(
        cls,
        buffers: Buffers,
        order: Sequence[int],
        big: Collection[int],
        candidates: Iterable[int],
        *,
        copies_at_once: bool = False,
    ) -> "Schedule":
        """Build the schedule of ``order`` whose steps are the ops in ``big``."""
        chain = tuple(op for op in order if op in big)
        return cls(buffers, tuple(order), chain, tuple(candidates), copies_at_once)

    @cached_property
    def step(self) -> dict[int, int]:
        """The step of each op of the chain."""
        return {op: step for step, op in enumerate(self.chain)}

    @cached_property
    def uses(self) -> dict[int, tuple[int, ...]]:
        """For each candidate the steps that make and read it, ascending."""
        graph, step = self.buffers.graph, self.step
        return {
            root: tuple(
                sorted({step[graph.tensors[root].op], *(step[op] for op in self.buffers.users[root])})
            )
            for root in self.candidates
        }

    @cached_property
    def reads(self) -> dict[int, tuple[Use, ...]]:
        """For each candidate every slot that reads it, in chain order; passing an alias on does not count."""
        graph, step = self.buffers.graph, self.step
        return {
            root: tuple(
                Use(op, slot)
                for op in sorted(self.buffers.users[root], key=step.__getitem__)
                for slot, tensor in enumerate(graph.ops[op].inputs)
                if graph.roots[tensor] == root and not _passes_on(self.buffers, op, tensor)
            )
            for root in self.candidates
        }

    @cached_property
    def apart(self) -> frozenset[int]:
        """The candidates that are out of use for a whole step or more."""
        return frozenset(
            root
            for root, steps in self.uses.items()
            if any(back - left > 1 for left, back in zip(steps, steps[1:], strict=False))
        )

    @cached_property
    def serial_edges(self) -> tuple[SerialEdge, ...]:
        """The control edges that keep the steps in order."""
        return serial_edges(self.buffers.graph, self.order, self.chain)

    @cached_property
    def timeline(self) -> Timeline:
        """The memory over time without any swap."""
        return self.buffers.timeline(self.order, ())

    @cached_property
    def memory(self) -> tuple[int, ...]:
        """Bytes at each point, without any swap."""
        memory = [0] * (2 * len(self.chain) + 1)
        step, done = self.step, 0
        allocated = self.timeline.allocated
        for place, op in enumerate(self.order):
            inside = 2 * done
            if op in step:
                memory[inside + 1] = allocated[2 * place]
                done += 1
            else:
                memory[inside] = max(memory[inside], allocated[2 * place])
            memory[2 * done] = max(memory[2 * done], allocated[2 * place + 1])
        return tuple(memory)

    @cached_property
    def working_sets(self) -> tuple[int, ...]:
        """For each point the bytes that no swap can take away there."""
        change = [0] * (2 * len(self.chain) + 2)
        for root, steps in self.uses.items():
            nbytes = self.buffers.nbytes[root]
            for left, back in zip(steps, steps[1:], strict=False):
                if back - left > 1:  # freed by the step behind ``left``, fetched by the one before ``back``
                    change[2 * left + 3] -= nbytes
                    change[2 * back] += nbytes
        sets, away = [], 0
        for total, moved in zip(self.memory, change, strict=False):
            away += moved
            sets.append(total + away)
        return tuple(sets)

    @property
    def floor(self) -> tuple[int, int | None]:
        """The largest working set in bytes, and its op (``None`` in a graph without steps)."""
        most = max(self.working_sets, default=0)
        if not self.chain:
            return most, None
        return most, self.chain[min(self.working_sets.index(most) // 2, len(self.chain) - 1)]

    def away(self, trip: Trip) -> tuple[int, int]:
        """Return the first and last point at which the trip keeps the buffer's bytes free."""
        start = 2 * trip.left + 2 if trip.freed is None else 2 * trip.freed + 1
        return start, 2 * trip.trigger + 1

    def swaps(self, trips: Iterable[Trip]) -> tuple[Swap, ...]:
        """Turn trips into the swaps of a plan, in the order in which the buffers are made."""
        by_tensor: dict[int, list[Trip]] = {}
        for trip in trips:
            by_tensor.setdefault(trip.tensor, []).append(trip)
        made = {root: self.step[self.buffers.graph.tensors[root].op] for root in by_tensor}
        return tuple(
            self._swap(root, sorted(by_tensor[root], key=lambda trip: trip.back))
            for root in sorted(by_tensor, key=lambda root: (made[root], root))
        )

    def _swap(self, root: int, trips: list[Trip]) -> Swap:
        graph = self.buffers.graph
        reads = self.reads[root]
        ends = [trip.left for trip in trips[1:]] + [len(self.chain)]
        swap_ins = tuple(
            SwapIn(
                self.chain[trip.trigger],
                tuple(use for use in reads if trip.back <= self.step[use.op] <= end),
                () if trip.awaited is None else (self.chain[trip.awaited],),
            )
            for trip, end in zip(trips, ends, strict=True)
        )
        left, freed = trips[0].left, trips[0].freed
        blocks = () if freed is None else (self.chain[freed],)
        # A copy that frees its buffer at once is done while the step behind ``left`` runs, unless that waits.
        at_once = self.copies_at_once and freed is not None and freed > left + 1
        until = None if freed is None else self.chain[left + 1 if at_once else freed - 1]
        tensor = graph.tensors[root]
        return Swap(root, tensor.nbytes or 0, tensor.op, swap_ins, blocks, until, at_once)


def _passes_on(buffers: Buffers, op: int, tensor: int) -> bool:
    node = buffers.graph.ops[op]
    return any(buffers.graph.tensors[out].alias_of == tensor for out in node.outputs)
