"""The plan that the planner makes and the rewriter applies: one frozen value, deterministic.

Meaning of a plan for the executor, all by ids of :class:`lms.ir.graph.Graph`:

* For each :class:`Swap` one swap-out node reads ``tensor`` (data edge), after op ``after`` (control edge,
  left out when it is the producer). Ops in ``blocks`` get a control edge from the swap-out: they run once
  the copy is done. On a GPU, with ``until``, a node in between holds the buffer until that op is done, too.
* For each :class:`SwapIn` one swap-in node reads the swap-out, after op ``trigger`` (control edge). Every
  use in ``uses`` reads the swap-in instead of what it read (reshaped where it read an alias of another
  shape). Ops in ``blocks`` get a control edge from the swap-in.
* For each :class:`SerialEdge` op ``after`` gets a control edge from op ``before``.
* For each :class:`Filler` one node takes memory behind all that op ``op`` waits for, and before the op; with
  ``copies`` behind the op, and before the swap-ins that it triggers and op ``follower``. Another frees it
  once the op, or these swap-ins, are done, and before op ``until``.
* Each :class:`Sent` is an op of the graph itself that copies a tensor to the host, for another op to read it
  there. A swap of that tensor takes this copy instead of making one (:meth:`SwapPlan.copied`).

All of these edges go forward in ``order``, in which a swap-out stands right behind ``after`` and a swap-in
right behind ``trigger``; so no plan can make a cycle, and no swap-in can be read before it was swapped out.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from lms.ir.graph import Use


class SwapIn(NamedTuple):
    """One copy back to the device, shared by all its uses."""

    trigger: int
    """Op after which the copy may start. Never an op that needs the copy."""
    uses: tuple[Use, ...]
    """The readers of the copy, in plan order."""
    blocks: tuple[int, ...] = ()
    """Further ops that wait until the copy is done (``sync_mode``)."""


class Swap(NamedTuple):
    """One tensor that leaves the device once and comes back once or more, with the same values."""

    tensor: int
    """The tensor that owns the buffer (never an alias)."""
    nbytes: int
    after: int
    """Op after which the copy to the host starts: the producer or a later op."""
    swap_ins: tuple[SwapIn, ...]
    """In plan order."""
    blocks: tuple[int, ...] = ()
    """Ops that wait until the copy to the host is done, because they need its memory."""
    until: int | None = None
    """The last op of the chain that the buffer is planned to outlive; ``None``: none beyond its readers."""
    at_once: bool = False
    """Whether the buffer is planned to be free once ``until`` is done, although ``blocks`` come later."""

    @property
    def waiting(self) -> tuple[int, ...]:
        """All ops that wait for the copy to the host, at once or through a copy back."""
        through = (op for back in self.swap_ins for op in (*back.blocks, *(use.op for use in back.uses)))
        return (*self.blocks, *through)

    @property
    def edges(self) -> "tuple[SerialEdge, ...]":
        """The pairs of ops that run one after the other because a copy lies between them."""
        blocked = (SerialEdge(self.after, op) for op in self.blocks)
        back = (
            SerialEdge(swap_in.trigger, op)
            for swap_in in self.swap_ins
            for op in (*(use.op for use in swap_in.uses), *swap_in.blocks)
        )
        return (*blocked, *back)


class SerialEdge(NamedTuple):
    """A control edge that fixes the order of two ops."""

    before: int
    after: int


class Filler(NamedTuple):
    """Memory that is taken while a buffer is allocated, so that the buffer gets what it asks for and no more.

    See :mod:`lms.simulate.fillers`.
    """

    op: int
    """An op of the chain: the one that makes the buffer, or with ``copies`` that brings it back."""
    copies: bool
    """Whether the buffer is one that comes back."""
    sizes: tuple[int, ...]
    """Bytes of each buffer that is allocated then, in that order."""
    least: int
    """The fewest bytes that are worth taking."""
    follower: int
    """The next op of the chain."""
    last: int
    """The last op of the chain that they outlive."""
    until: int
    """The op that waits until they are free again."""

    @property
    def edges(self) -> "tuple[SerialEdge, ...]":
        """The pairs of ops that run one after the other because the filler lies between them."""
        return (SerialEdge(self.op, self.follower), SerialEdge(self.last, self.until))


class Sent(NamedTuple):
    """A copy to the host of which an op reads there (see :mod:`lms.planner.host_operands`)."""

    op: int
    """The op that copies."""
    tensor: int
    nbytes: int


class Recomputed(NamedTuple):
    """What a plan does not keep for the backward pass but makes again there.

    The ops that make it again are ops of the plan's graph (see :mod:`lms.planner.recomputation`).
    """

    ops: int
    """Ops that run twice."""
    tensors: int
    """Tensors of which the backward pass reads copies."""
    nbytes: int
    """Bytes of these tensors."""
    seconds: float
    """What the ops take a second time, by the cost model."""


class Rejected(NamedTuple):
    """A tensor that stays on the device, and why."""

    tensor: int
    nbytes: int | None
    reason: str


@dataclass(frozen=True)
class SwapPlan:
    """The whole decision for one graph; without swaps and edges (:attr:`is_empty`) nothing is edited."""

    policy: str
    order: tuple[int, ...]
    """All op ids in the order that was planned; ``serial_edges`` enforce what of it matters."""
    swaps: tuple[Swap, ...]
    serial_edges: tuple[SerialEdge, ...]
    rejected: tuple[Rejected, ...]
    peak_before_bytes: int
    """Predicted peak of the unedited step, in the original order."""
    peak_bytes: int
    """Predicted peak of the edited step."""
    floor_bytes: int
    """The least that any plan can reach: the largest working set of one op, with what cannot be swapped."""
    floor_op: int | None
    """The op whose working set is the floor."""
    budget_bytes: int | None = None
    """The limit that the plan had to meet (margin already taken off), if there was one."""
    notes: tuple[str, ...] = ()
    """One line each, for people: why nothing is edited, why the budget cannot be met and what would help."""
    sent: tuple[Sent, ...] = ()
    """Copies to the host that ops read there, beside the swaps."""
    fetched_bytes: int = 0
    """Bytes that ops on the host have made there, and that are copied to the device."""
    fillers: tuple[Filler, ...] = ()
    """In plan order."""
    batches: int = 0
    """Batches of an input pipeline that have room of their own on the device."""
    recomputed: Recomputed | None = None
    """What is made again in place of being kept; ``None``: nothing."""

    @property
    def is_empty(self) -> bool:
        """Whether applying the plan changes nothing."""
        return not (self.swaps or self.serial_edges or self.sent or self.recomputed)

    @property
    def feasible(self) -> bool:
        """Whether the predicted peak meets the budget (always, without one)."""
        return self.budget_bytes is None or self.peak_bytes <= self.budget_bytes

    @property
    def bytes_out(self) -> int:
        """Bytes copied to the host in one step."""
        copied = self.copied
        moved = sum(swap.nbytes for swap in self.swaps if swap.tensor not in copied)
        return moved + sum(sent.nbytes for sent in self.sent)

    @property
    def bytes_moved(self) -> int:
        """Bytes copied to the host and back in one step."""
        return self.bytes_out + self.bytes_in

    @property
    def tensors_out(self) -> int:
        """The number of tensors that leave the device in one step."""
        return len(self.swaps) - len(self.copied) + len(self.sent)

    @cached_property
    def copied(self) -> Mapping[int, int]:
        """The swapped tensors that are sent in time for their swaps, each with the op that copies it."""
        if not self.sent:
            return {}
        place = {op: index for index, op in enumerate(self.order)}
        senders = {sent.tensor: sent.op for sent in self.sent}
        return {
            swap.tensor: op
            for swap in self.swaps
            if (op := senders.get(swap.tensor)) is not None
            and all(place[op] < place[later] for later in swap.waiting)
        }

    @property
    def bytes_in(self) -> int:
        """Bytes copied back in one step."""
        return sum(swap.nbytes * len(swap.swap_ins) for swap in self.swaps) + self.fetched_bytes

    @property
    def rejected_by_reason(self) -> dict[str, int]:
        """The number of tensors that each reason kept on the device, most frequent first."""
        return dict(Counter(rejection.reason for rejection in self.rejected).most_common())
