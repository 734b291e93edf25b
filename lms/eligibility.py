"""Which buffers may leave the device, and why the others may not."""

from collections.abc import Collection
from dataclasses import dataclass

from lms.liveness import Buffers
from lms.swap_plan import Rejected

UNKNOWN_SIZE = "size is unknown"
"""The reason why a tensor stays of which nobody can say what it takes."""

FLOATING = "read or made by communication, by an update in a session, or by what waits for one"
"""The reason why a tensor stays whose maker or readers float (:func:`lms.serialize.floating_ops`)."""


@dataclass(frozen=True)
class Eligibility:
    """The verdict on every buffer of a graph, by id."""

    candidates: tuple[int, ...]
    """Buffers that may be swapped, in schedule order."""
    rejected: tuple[Rejected, ...]


def judge(buffers: Buffers, min_bytes: int, floating: Collection[int], big: Collection[int]) -> Eligibility:
    """Judge every buffer; ``big`` are the ops whose order is fixed, which all its readers have to be."""
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
        reason = _why_not(buffers, tensor.id, min_bytes, floating, big) or forbidden.get(tensor.id)
        if reason is None:
            candidates.append(tensor.id)
        else:
            rejected.append(Rejected(tensor.id, tensor.nbytes, reason))
    return Eligibility(tuple(candidates), tuple(rejected))


def _why_not(
    buffers: Buffers, root: int, min_bytes: int, floating: Collection[int], big: Collection[int]
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
    if any(buffers.graph.ops[op].conditional for op in (tensor.op, *buffers.users[root])):
        return "read or made under a condition"
    if tensor.op in floating or any(op in floating for op in buffers.users[root]):
        return FLOATING
    if tensor.op not in big or any(op not in big for op in buffers.users[root]):
        return "read by an op that passes another buffer on"
    return None
