"""The memory of one step over a schedule: what is allocated when, the peak, and what is alive at the peak.

The model is that of TensorFlow's executor on top of its BFC allocator: an output is allocated when its op
starts and freed when the last reader of its buffer is done; aliases share one buffer; a kernel may write in
place over an input that nobody else reads any more; every buffer is rounded up to 256 bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from lms.graph import Graph
from lms.swap_plan import Swap

GRANULE_BYTES = 256
"""``BFCAllocator::kMinAllocationSize``: every allocation is a multiple of it."""


def round_up(nbytes: int) -> int:
    """The bytes the allocator takes for a buffer of ``nbytes``."""
    return -(-nbytes // GRANULE_BYTES) * GRANULE_BYTES


@dataclass(frozen=True)
class Buffers:
    """The graph's buffers, each known by the tensor that owns it (its root), indexed by tensor id."""

    graph: Graph
    nbytes: tuple[int, ...]
    """Rounded size; 0 for aliases, for tensors outside the step's memory and where the size is unknown."""
    users: tuple[tuple[int, ...], ...]
    """For a root the ops that read it or an alias of it, ascending; passing an alias on is not reading."""
    kept: tuple[bool, ...]
    """Whether the buffer is alive at the end of the step."""

    @classmethod
    def of(cls, graph: Graph) -> "Buffers":
        """Work the buffers out, in time linear in the graph."""
        roots, tensors = graph.roots, graph.tensors
        nbytes = tuple(
            0 if tensor.outside or tensor.alias_of is not None else round_up(tensor.nbytes or 0)
            for tensor in tensors
        )
        users: list[list[int]] = [[] for _ in tensors]
        for op in graph.ops:
            passed_on = {tensors[out].alias_of for out in op.outputs}
            for tensor in op.inputs:
                readers = users[roots[tensor]]
                if tensor not in passed_on and (not readers or readers[-1] != op.id):
                    readers.append(op.id)
        kept = [False] * len(tensors)
        for tensor in graph.kept:
            kept[roots[tensor]] = True
        return cls(graph, nbytes, tuple(map(tuple, users)), tuple(kept))

    def touched_by(self, op: int) -> list[int]:
        """The roots with memory that an op reads or makes, in slot order, without repeats."""
        node, roots = self.graph.ops[op], self.graph.roots
        touched = dict.fromkeys(roots[tensor] for tensor in (*node.inputs, *node.outputs))
        return [root for root in touched if self.nbytes[root]]


@dataclass(frozen=True, slots=True)
class Residency:
    """One stay of a buffer on the device, both ends included, in points (see :class:`Timeline`)."""

    tensor: int
    nbytes: int
    first: int
    last: int


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

    @cached_property
    def peak_bytes(self) -> int:
        """The most bytes allocated at once."""
        return max(self.allocated, default=0)

    @property
    def peak_position(self) -> int | None:
        """The first position in the order at which the peak is reached."""
        return self.allocated.index(self.peak_bytes) // 2 if self.allocated else None

    def live_at(self, position: int) -> list[Residency]:
        """What is on the device while the op at ``position`` runs, largest first."""
        live = [stay for stay in self.residencies if stay.first <= 2 * position <= stay.last]
        return sorted(live, key=lambda stay: (-stay.nbytes, stay.tensor))


def timeline(buffers: Buffers, order: Sequence[int], swaps: Sequence[Swap] = ()) -> Timeline:
    """The memory over ``order``, edited by ``swaps``.

    A swapped buffer leaves when its last reader on the device is done and an op that waits for the copy
    (``blocks``) starts; without such an op the copy is taken to keep up. It comes back right behind the
    trigger.
    """
    position = positions(order)
    by_tensor = {swap.tensor: swap for swap in swaps}
    stays = [
        stay
        for op in order
        for tensor in buffers.graph.ops[op].outputs
        if buffers.nbytes[tensor]
        for stay in _stays(buffers, position, tensor, by_tensor.get(tensor))
    ]
    stays = _forwarded(buffers, order, position, stays)
    change = [0] * (2 * len(order) + 1)
    for stay in stays:
        change[stay.first] += stay.nbytes
        change[stay.last + 1] -= stay.nbytes
    allocated = list(accumulate(change[:-1]))
    for place, op in enumerate(order):
        allocated[2 * place] += round_up(buffers.graph.ops[op].workspace_bytes)
    return Timeline(tuple(order), tuple(allocated), tuple(stays))


def positions(order: Sequence[int]) -> list[int]:
    """For each op its place in ``order``."""
    position = [0] * len(order)
    for place, op in enumerate(order):
        position[op] = place
    return position


def _stays(buffers: Buffers, position: list[int], tensor: int, swap: Swap | None) -> list[Residency]:
    nbytes, users = buffers.nbytes[tensor], buffers.users[tensor]
    made = position[buffers.graph.tensors[tensor].op]
    if swap is None:
        last = max((position[op] for op in users), default=made)
        return [
            Residency(tensor, nbytes, 2 * made, 2 * len(position) - 1 if buffers.kept[tensor] else 2 * last)
        ]
    far = {use.op for swap_in in swap.swap_ins for use in swap_in.uses}
    near = max([made, position[swap.after], *(position[op] for op in users if op not in far)])
    copied = min((2 * position[op] - 1 for op in swap.blocks), default=0)
    stays = [Residency(tensor, nbytes, 2 * made, max(2 * near, copied))]
    for swap_in in swap.swap_ins:
        last = max(position[use.op] for use in swap_in.uses)
        stays.append(Residency(tensor, nbytes, 2 * position[swap_in.trigger] + 1, 2 * last))
    return stays


def _forwarded(
    buffers: Buffers, order: Sequence[int], position: list[int], stays: list[Residency]
) -> list[Residency]:
    """End a stay that an op takes over just before that op, which counts the bytes as its output."""
    final = {stay.tensor: index for index, stay in enumerate(stays)}
    ended = list(stays)
    for source, op in in_place_pairs(buffers, order, position).items():
        stay = ended[final[source]]
        if stay.last == 2 * position[op]:
            ended[final[source]] = Residency(stay.tensor, stay.nbytes, stay.first, stay.last - 1)
    return ended


def in_place_pairs(buffers: Buffers, order: Sequence[int], position: list[int]) -> dict[int, int]:
    """For each buffer that an op takes over, that op: it is the buffer's last reader and the sizes agree."""
    graph, roots = buffers.graph, buffers.graph.roots
    pairs: dict[int, int] = {}
    for op in order:
        node = graph.ops[op]
        wanted = buffers.nbytes[node.outputs[0]] if node.in_place and node.outputs else 0
        inputs = [roots[tensor] for tensor in node.inputs] if wanted else []
        for slot in node.in_place if wanted else ():
            source = inputs[slot]
            if (
                buffers.nbytes[source] == wanted
                and not buffers.kept[source]
                and inputs.count(source) == 1
                and max(position[user] for user in buffers.users[source]) == position[op]
            ):
                pairs[source] = op
                break
    return pairs
