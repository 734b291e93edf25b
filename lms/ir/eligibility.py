"""Decide which buffers may leave the device, with a reason for each that may not."""

from dataclasses import dataclass

from lms.ir.liveness import Buffers
from lms.ir.swap_plan import Rejected

UNKNOWN_SIZE = "size is unknown"
"""The reason why a tensor stays whose bytes are not known."""

FLOATING = "read or made by communication, by an update in a session, or by what waits for one"
"""The reason why a tensor stays whose maker or readers float (:func:`lms.schedule.op_order.floating_ops`)."""


EARLY = "read or made by what a step without a batch runs, too"
"""The reason why a tensor stays whose maker or readers :func:`lms.schedule.op_order.early_ops` finds."""


@dataclass(frozen=True)
class Eligibility:
    """The verdict on every buffer of a graph, by id."""

    candidates: tuple[int, ...]
    """Buffers that may be swapped, in schedule order."""
    rejected: tuple[Rejected, ...]

    def without_candidates(self, reason: str, buffers: Buffers) -> "Eligibility":
        """Return the verdict that keeps all candidates on the device, for one ``reason``."""
        tensors = buffers.graph.tensors
        kept = (Rejected(root, tensors[root].nbytes, reason) for root in self.candidates)
        return Eligibility((), (*self.rejected, *kept))


def judge(
    buffers: Buffers,
    min_bytes: int,
    floating: frozenset[int],
    big: frozenset[int],
    early: frozenset[int] = frozenset(),
) -> Eligibility:
    """Judge every buffer of the graph.

    Args:
        buffers: The graph's buffers.
        min_bytes: Smaller ones stay.
        floating: See :func:`lms.schedule.op_order.floating_ops`.
        big: The ops whose order is fixed, which all that make and read a buffer have to be.
        early: See :func:`lms.schedule.op_order.early_ops`.
    """
    graph = buffers.graph
    forbidden: dict[int, str] = {}
    for tensor in graph.tensors:
        if tensor.forbidden is not None:
            forbidden.setdefault(graph.roots[tensor.id], tensor.forbidden)
    candidates: list[int] = []
    rejected: list[Rejected] = []
    for tensor in graph.tensors:
        if tensor.alias_of is not None or (tensor.nbytes is not None and not tensor.nbytes):
            continue
        reason = _why_not(buffers, tensor.id, min_bytes, floating, big, early) or forbidden.get(tensor.id)
        if reason is None:
            candidates.append(tensor.id)
        else:
            rejected.append(Rejected(tensor.id, tensor.nbytes, reason))
    return Eligibility(tuple(candidates), tuple(rejected))


def _why_not(
    buffers: Buffers,
    root: int,
    min_bytes: int,
    floating: frozenset[int],
    big: frozenset[int],
    early: frozenset[int],
) -> str | None:
    tensor = buffers.graph.tensors[root]
    if tensor.outside:
        return "not in the step's device memory"
    if tensor.nbytes is None:
        return UNKNOWN_SIZE
    if tensor.nbytes < min_bytes:
        return "smaller than min_tensor_bytes"
    if buffers.kept[root]:
        return "output of the step"
    if not buffers.users[root]:
        return "nobody reads it"
    touching = (tensor.op, *buffers.users[root])
    if buffers.graph.ops[tensor.op].conditional:
        return "made under a condition"
    if not floating.isdisjoint(touching):
        unordered = any(buffers.graph.ops[op].unordered for op in touching)
        return "read or made by an op that may get no control edge" if unordered else FLOATING
    if not early.isdisjoint(touching):
        return EARLY
    if not big.issuperset(touching):
        return "read by an op that passes another buffer on"
    return None
