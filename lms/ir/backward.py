"""Tell the backward pass of a step from its forward pass."""

import re
from collections.abc import Iterator

from lms.ir.graph import Graph
from lms.ir.op_traits import BACKWARD_SCOPE, is_backward, is_backward_type

_OF_SESSIONS = re.compile(r"_grad(_\d+)?$")
"""What ``tf.gradients`` adds to the name of an op for the scope of its gradient."""


def backward_ops(graph: Graph) -> frozenset[int]:
    """Find the ops of the backward pass: gradient ops by name or type, and what depends on them.

    TensorFlow merges equal ops of both passes under the name of either. On a GPU that happens to the
    transposes of an image for a convolution and for its gradient. So what the forward pass depends on is left
    out, whatever its name, and so is an op that waits for no other, such as a constant.
    """
    forward = _forward_ops(graph)
    backward: set[int] = set()
    for op in graph.ops:
        before = graph.predecessors[op.id]
        is_named = op.id in graph.backward or is_backward(op.name, op.type)
        if before and op.id not in forward and (is_named or not backward.isdisjoint(before)):
            backward.add(op.id)
    return frozenset(backward)


def _forward_ops(graph: Graph) -> set[int]:
    """Find the ops that gradients are named after, and what these depend on."""
    scopes = {scope for op in graph.ops for scope in _differentiated(op.name)} - {""}
    behind: set[int] = set()
    """Gradient ops by their type, or because the planner says so, and what depends on them."""
    forward: set[int] = set()
    for op in graph.ops:
        before = graph.predecessors[op.id]
        if op.id in graph.backward or is_backward_type(op.type) or not behind.isdisjoint(before):
            behind.add(op.id)
        elif not is_backward(op.name, op.type) and (
            op.name in scopes or op.name.rpartition("/")[0] in scopes
        ):
            forward.add(op.id)
    for op in reversed(graph.ops):
        if op.id in forward:
            forward.update(graph.predecessors[op.id])
    return forward


def _differentiated(name: str) -> Iterator[str]:
    """Yield the scopes of the op that an op is a gradient of, by its name; nothing where it is none."""
    found = BACKWARD_SCOPE.search(name) if "gradient" in name else None
    if found is not None:
        outer, inner = name[: found.end(1)], name[found.end() :].rpartition("/")[0]
        inner = _OF_SESSIONS.sub("", inner)
        yield outer + inner
        if outer:
            yield inner
