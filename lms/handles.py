"""The variables and other resources that a traced graph captures, as they are outside of it."""

from collections.abc import Iterator
from typing import Any

import tensorflow as tf


def variable_handles(tf_graph: Any) -> Iterator[Any]:
    """The handles of all variables that a traced graph reads or writes.

    A graph's own list of variables has the ones that are read: not the momentum that a kernel updates, nor
    the total that a metric adds to.
    """
    for captured, _ in tf_graph.captures:
        handle = outermost(captured)
        if handle is not None and handle.dtype == tf.resource and value_type(handle) is not None:
            yield handle


def outermost(tensor: Any) -> Any:
    """What a captured tensor stands for outside of all functions; ``None`` when it is made in one."""
    while tensor is not None and not hasattr(tensor, "numpy"):
        captures = getattr(tensor.graph, "captures", ())
        tensor = next((outer for outer, inner in captures if inner is tensor), None)
    return tensor


def value_type(handle: Any) -> Any:
    """The type of a variable's value; ``None`` for iterators, tables and other resources."""
    data = getattr(handle, "_handle_data", None)
    return tf.as_dtype(data.shape_and_type[0].dtype) if data is not None and data.shape_and_type else None
