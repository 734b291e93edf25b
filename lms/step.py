"""Finds what runs: the training step in a graph of compat.v1, or what of a function has an effect.

A graph of compat.v1 also holds initialisers, savers and evaluation, and what a session fetches decides what
runs. An edge into an op outside of the step would make whoever fetches that op run a part of the training; so
the step is planned alone, and updates are never put in an order.

A tape records more than its function needs: the score of a critic of which only the slope is used. TensorFlow
drops such ops. An edge from one of them would have it run after all.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

from tensorflow.python.framework import op_def_registry

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


def running_ops(types: Mapping[Any, str], ends: Iterable[Any]) -> set[Any]:
    """What a function runs: its ends, what has an effect or a state, and all that these need.

    Args:
        types: The types of all ops of the function.
        ends: Those that make its results, and those that must run.
    """
    return _reach({*ends, *(op for op, op_type in types.items() if is_stateful(op_type))}, _needs)


@cache
def is_stateful(op_type: str) -> bool:
    """Whether ops of this type do more than compute their results, or may."""
    known = op_def_registry.get(op_type)
    return known is None or bool(known.is_stateful)


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
