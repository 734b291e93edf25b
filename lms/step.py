"""Finds the training step in a graph of compat.v1, which also holds initialisers, savers and evaluation.

What a session fetches decides what runs. An edge into an op outside of the step would make whoever fetches
that op run a part of the training; so the step is planned alone, and updates are never put in an order.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

UPDATE_TYPES = (
    "Apply",
    "Assign",
    "ResourceApply",
    "ResourceScatter",
    "ResourceSparseApply",
    "ScatterAdd",
    "ScatterSub",
    "ScatterUpdate",
    "SparseApply",
)
"""How the types of ops begin that change a variable."""


def step_ops(operations: Sequence[Any], is_backward: Callable[[Any], bool]) -> list[Any]:
    """What a training step runs: the backward pass, what follows from it, and all that these need.

    Args:
        operations: All ops of the graph.
        is_backward: Whether an op belongs to the backward pass.

    Returns:
        The step's ops in the order of ``operations``; all of them where nothing is trained.
    """
    started = [op for op in operations if is_backward(op)]
    if not started:
        return list(operations)
    following = _reach(started, _readers)
    needed = _reach(following, _needs)
    return [op for op in operations if op in needed]


def is_update(op_type: str) -> bool:
    """Whether ops of this type change a variable."""
    return op_type.startswith(UPDATE_TYPES)


def _readers(op: Any) -> Iterable[Any]:
    for output in op.outputs:
        yield from output.consumers()
    yield from op._control_outputs


def _needs(op: Any) -> Iterable[Any]:
    for tensor in op.inputs:
        yield tensor.op
    yield from op.control_inputs


def _reach(start: Iterable[Any], following: Callable[[Any], Iterable[Any]]) -> set[Any]:
    reached = set(start)
    waiting = list(reached)
    while waiting:
        for op in following(waiting.pop()):
            if op not in reached:
                reached.add(op)
                waiting.append(op)
    return reached
