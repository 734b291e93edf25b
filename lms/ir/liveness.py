"""The memory of one step over a schedule: what is allocated when, the peak, and what is alive at the peak.

The model is that of TensorFlow's executor on top of its BFC allocator: an output is allocated when its op
starts and freed when the last reader of its buffer is done; aliases share one buffer; a kernel may write in
place over an input that no other op reads any more; every buffer is rounded up to 256 bytes.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

from lms.ir.graph import Graph, Op
from lms.ir.op_traits import STREAM_ENTER, in_place_output
from lms.ir.swap_plan import Swap

Found = TypeVar("Found")

GRANULE_BYTES = 256
"""``BFCAllocator::kMinAllocationSize``: every allocation is a multiple of it."""


SMALL_BYTES = 16 << 10
"""Up to here a buffer is small: the statistics of 4,096 channels."""

VARIABLE_OPS = (
    "ReadVariableOp",
    "AssignVariableOp",
    "AssignAddVariableOp",
    "AssignSubVariableOp",
    "ResourceApply",
)
"""Beginnings of the types of ops on variables. All but the first two write in place, or into a copy while
others still read it."""


def round_up(nbytes: int) -> int:
    """Return the bytes that the allocator takes for a buffer of ``nbytes``."""
    return -(-nbytes // GRANULE_BYTES) * GRANULE_BYTES


@dataclass(frozen=True)
class Buffers:
    """The graph's buffers, each known by the tensor that owns it (its root), indexed by tensor id."""

    graph: Graph
    nbytes: tuple[int, ...]
    """Rounded size; 0 for aliases, for tensors outside the step's memory and where the size is unknown."""
    users: tuple[tuple[int, ...], ...]
    """For a root the ops that read it or an alias of it, ascending; passing an alias on is not reading. What
    communication holds on a GPU is used by all that use its result."""
    kept: tuple[bool, ...]
    """Whether the buffer is alive at the end of the step."""

    @classmethod
    def of(cls, graph: Graph) -> "Buffers":
        """Compute the buffers of ``graph``, in time linear in the graph."""
        roots, tensors = graph.roots, graph.tensors
        nbytes = tuple(
            0 if tensor.outside or tensor.alias_of is not None else round_up(tensor.nbytes or 0)
            for tensor in tensors
        )
        users: list[list[int]] = [[] for _ in tensors]
        for op in graph.ops:
            passed_on = [tensors[out].alias_of for out in op.outputs]
            for tensor in op.inputs:
                readers = users[roots[tensor]]
                if tensor not in passed_on and (not readers or readers[-1] != op.id):
                    readers.append(op.id)
        for op in graph.ops:
            if op.holds_operands:
                for operand, result in zip(op.inputs, op.outputs, strict=False):
                    held = users[roots[operand]]
                    held[:] = sorted({*held, *users[roots[result]]})
        kept = [False] * len(tensors)
        for tensor in graph.kept:
            kept[roots[tensor]] = True
        return cls(graph, nbytes, tuple(map(tuple, users)), tuple(kept))

    @cached_property
    def owners(self) -> tuple[int, ...]:
        """The roots that take memory in the step, ascending."""
        return tuple(root for root, nbytes in enumerate(self.nbytes) if nbytes)

    @cached_property
    def with_workspace(self) -> tuple[int, ...]:
        """The ops that need scratch memory."""
        return tuple(op.id for op in self.graph.ops if op.workspace_bytes)

    @cached_property
    def with_variables(self) -> tuple[Op, ...]:
        """The ops that read, replace or update a variable that stays on the device."""
        tensors, ops = self.graph.tensors, self.graph.ops
        return tuple(
            op
            for op in ops
            if op.type.startswith(VARIABLE_OPS)
            and not any(ops[tensors[tensor].op].type == STREAM_ENTER for tensor in op.inputs)
        )

    @cached_property
    def reads(self) -> tuple[tuple[int, ...], ...]:
        """For each op, the roots with memory that it reads."""
        reads: list[list[int]] = [[] for _ in self.graph.ops]
        for root in self.owners:
            for op in self.users[root]:
                reads[op].append(root)
        return tuple(map(tuple, reads))

    def placement(self, order: Sequence[int]) -> "Placement":
        """Return the placement of the buffers in ``order``, computed once for all plans of that order."""
        order = tuple(order)
        return self.once((Placement, order), lambda: Placement.of(self, order))

    def timeline(self, order: tuple[int, ...], swaps: tuple[Swap, ...]) -> "Timeline":
        """Return the memory over ``order`` with ``swaps`` (:func:`timeline`), computed once."""
        return self.once((Timeline, order, swaps), lambda: timeline(self, order, swaps))

    def once(self, key: Hashable, work: Callable[[], Found]) -> Found:
        """Call ``work`` once for each ``key`` and return its result, which is kept with the buffers."""
        found: Found | None = self._found.get(key)  # a key takes its time: it may hold a whole plan
        if found is None:
            found = self._found[key] = work()
        return found

    @cached_property
    def _found(self) -> dict[Hashable, Any]:
        return {}

    @cached_property
    def takeovers(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """The ops that may write over an input, each with the roots whose buffers it could take, in order."""
        return tuple(
            (op.id, sources)
            for op in self.graph.ops
            if op.in_place and len(op.outputs) > in_place_output(op.type) and (sources := self._takeable(op))
        )

    @cached_property
    def takeable(self) -> Mapping[int, tuple[int, ...]]:
        """By op what it may write over, as in :attr:`takeovers`."""
        return dict(self.takeovers)

    def made_in_place(self, op: int) -> int:
        """Return the tensor that an op makes in place."""
        node = self.graph.ops[op]
        return node.outputs[in_place_output(node.type)]

    def _takeable(self, op: Op) -> tuple[int, ...]:
        wanted = self.nbytes[op.outputs[in_place_output(op.type)]]
        read = [self.graph.roots[tensor] for tensor in op.inputs]
        sources = (read[slot] for slot in op.in_place)
        return tuple(
            source
            for source in sources
            if wanted
            and self.nbytes[source] == wanted
            and not self.kept[source]
            and source not in self._assigned
            and read.count(source) == 1
        )

    @cached_property
    def _assigned(self) -> frozenset[int]:
        """The buffers that an assignment makes a variable's too, so that no kernel writes over them.

        Seen on TensorFlow 2.15.1 and 2.21.0. In an edited step that is too careful of values that are copied.
        """
        roots = self.graph.roots
        return frozenset(roots[op.inputs[1]] for op in self.graph.ops if op.type == "AssignVariableOp")


class Residency(NamedTuple):
    """One stay of a buffer on the device, both ends included, in points (see :class:`Timeline`)."""

    tensor: int
    nbytes: int
    first: int
    last: int
    needed: int = 0
    """Of a copy that came back: the place of its first reader in the order."""


@dataclass(frozen=True)
class Timeline:
    """The memory of a step at its points: ``2 * p`` while the op at position ``p`` runs, ``2 * p + 1`` after.

    The points between two ops matter, because there a buffer that comes back can meet one that has yet to
    leave.
    """

    order: tuple[int, ...]
    allocated: tuple[int, ...]
    """Bytes allocated at each point, scratch included."""
    residencies: tuple[Residency, ...]
    handed_on: Mapping[int, int]
    """By the buffer that a kernel makes in place the buffer whose bytes it keeps."""

    @cached_property
    def peak_bytes(self) -> int:
        """The most bytes allocated at once."""
        return max(self.allocated, default=0)

    @property
    def peak_position(self) -> int | None:
        """The first position in the order at which the peak is reached."""
        return self.allocated.index(self.peak_bytes) // 2 if self.allocated else None

    def live_at(self, position: int) -> list[Residency]:
        """Return what is on the device while the op at ``position`` runs, largest first."""
        live = [stay for stay in self.residencies if stay.first <= 2 * position <= stay.last]
        return sorted(live, key=lambda stay: (-stay.nbytes, stay.tensor))


def timeline(buffers: Buffers, order: Sequence[int], swaps: Sequence[Swap] = ()) -> Timeline:
    """Compute the memory over ``order`` with ``swaps``.

    A swapped buffer leaves when its last reader on the device is done and an op that waits for the copy
    (``blocks``) starts, or with ``at_once`` when ``until`` is done, if that is sooner; without such an op the
    copy is taken to keep up. It comes back right behind the trigger. A kernel may write in place over what
    came back, too, if no op reads that later.
    """
    placed = buffers.placement(order)
    by_tensor = {swap.tensor: swap for swap in swaps}
    over_copies = _taken_copies(buffers, placed, swaps)
    handed_on = {buffers.made_in_place(op): root for root, op in placed.takers.items()}
    handed_on |= {buffers.made_in_place(op): root for op, root in over_copies.items()}
    change = list(placed.change)
    stays: list[Residency] = []
    for stay in placed.stays:
        if stay.tensor in by_tensor:
            swapped = _swapped_stays(buffers, placed.position, by_tensor[stay.tensor], stay.last, over_copies)
            _count(change, (stay._replace(nbytes=-stay.nbytes), *swapped))
            stays += swapped
        else:
            stays.append(stay)
    return Timeline(placed.order, tuple(accumulate(change[:-1])), tuple(stays), handed_on)


def _taken_copies(buffers: Buffers, placed: "Placement", swaps: Sequence[Swap]) -> dict[int, int]:
    """Map ops to the swapped buffers of which they write over a copy that came back for them."""
    copies: dict[int, list[int]] = {}
    for swap in swaps:
        for swap_in in swap.swap_ins:
            last = max((use.op for use in swap_in.uses), key=placed.position.__getitem__)
            if last in buffers.takeable and swap.tensor in buffers.takeable[last]:
                copies.setdefault(last, []).append(swap.tensor)
    taken = frozenset(placed.takers.values())
    return {op: min(roots, key=buffers.takeable[op].index) for op, roots in copies.items() if op not in taken}


def _count(change: list[int], stays: Iterable[Residency]) -> None:
    """Add the bytes of stays to those by which the allocated memory changes at each point."""
    for _, nbytes, first, last, _ in stays:
        change[first] += nbytes
        change[last + 1] -= nbytes


@dataclass(frozen=True)
class Placement:
    """An order of the ops, and where buffers would stay without swaps."""

    order: tuple[int, ...]
    position: tuple[int, ...]
    """For each op its place in the order."""
    stays: tuple[Residency, ...]
    """One a buffer that takes memory. One whose bytes the next op takes over ends a point before that op."""
    scratch: tuple[tuple[int, int], ...]
    """At which points kernels need how many bytes for themselves."""
    takers: Mapping[int, int]
    """The buffers that an op takes over, each with that op."""

    @classmethod
    def of(cls, buffers: Buffers, order: tuple[int, ...]) -> "Placement":
        """Compute the placement of ``buffers`` in ``order``."""
        position, end = positions(order), 2 * len(order) - 1
        last = _last_uses(buffers, position)
        takers = in_place_pairs(buffers, position, last)
        tensors, ops = buffers.graph.tensors, buffers.graph.ops
        stays = tuple(
            Residency(
                root,
                buffers.nbytes[root],
                2 * position[tensors[root].op],
                end if buffers.kept[root] else 2 * last[root] - (root in takers),
            )
            for root in buffers.owners
        )
        scratch = tuple(
            (2 * position[op], round_up(ops[op].workspace_bytes)) for op in buffers.with_workspace
        )
        return cls(order, tuple(position), stays, scratch, takers)

    @cached_property
    def change(self) -> Sequence[int]:
        """By how many bytes the allocated memory changes at each point, scratch included."""
        change = [0] * (2 * len(self.order) + 1)
        _count(change, self.stays)
        _count(change, (Residency(-1, nbytes, point, point) for point, nbytes in self.scratch))
        return change


def positions(order: Sequence[int]) -> list[int]:
    """Return for each op its place in ``order``."""
    position = [0] * len(order)
    for place, op in enumerate(order):
        position[op] = place
    return position


def _last_uses(buffers: Buffers, position: Sequence[int]) -> list[int]:
    """Return for each root the position of its last reader, or of its producer when no op reads it."""
    last = [0] * len(buffers.nbytes)
    for root in buffers.owners:
        latest = position[buffers.graph.tensors[root].op]
        for op in buffers.users[root]:
            if position[op] > latest:
                latest = position[op]
        last[root] = latest
    return last


def _swapped_stays(
    buffers: Buffers, position: Sequence[int], swap: Swap, end: int, over_copies: Mapping[int, int]
) -> list[Residency]:
    """Return the stays of a swapped buffer, of which the last one ends at point ``end``."""
    root, nbytes, users = swap.tensor, buffers.nbytes[swap.tensor], buffers.users[swap.tensor]
    made = position[buffers.graph.tensors[root].op]
    far = {use.op for swap_in in swap.swap_ins for use in swap_in.uses}
    near = max([made, position[swap.after], *(position[op] for op in users if op not in far)])
    copied = min((2 * position[op] - 1 for op in swap.blocks), default=0)
    if swap.at_once and swap.until is not None:
        copied = min(copied, 2 * position[swap.until])
    stays = [Residency(root, nbytes, 2 * made, max(2 * near, copied))]
    for swap_in in swap.swap_ins:
        reader = max((use.op for use in swap_in.uses), key=position.__getitem__)
        last = min(2 * position[reader] - (over_copies.get(reader) == root), end)
        needed = min(position[use.op] for use in swap_in.uses)
        stays.append(Residency(root, nbytes, 2 * position[swap_in.trigger] + 1, last, needed))
    return stays


def in_place_pairs(buffers: Buffers, position: Sequence[int], last: Sequence[int]) -> dict[int, int]:
    """Map each buffer that an op takes over to that op.

    The op is the buffer's last reader, and the sizes agree. ``last`` holds the position of each root's last
    reader.
    """
    pairs: dict[int, int] = {}
    for op, sources in buffers.takeovers:
        source = next((source for source in sources if last[source] == position[op]), None)
        if source is not None:
            pairs[source] = op
    return pairs
