"""The variables and other resources that a function of the runtime is called with."""

from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf


def variable_handles(inputs: Sequence[Any]) -> Iterator[Any]:
    """Yield the handles of the variables among a function's inputs, captured ones included."""
    for tensor in inputs:
        if getattr(tensor, "dtype", None) == tf.resource and value_type(tensor) is not None:
            yield tensor


def value_type(handle: Any) -> Any:
    """Return the type of a variable's value; ``None`` for iterators, tables and other resources."""
    data = getattr(handle, "_handle_data", None)
    return tf.as_dtype(data.shape_and_type[0].dtype) if data is not None and data.shape_and_type else None


def value_shape(handle: Any) -> Any:
    """Return the shape of a variable's value, as far as its handle knows it."""
    return tf.TensorShape(handle._handle_data.shape_and_type[0].shape)


def static_bytes(shape: Any, dtype: Any) -> int:
    """Return the bytes of a tensor of this shape; 0 while the shape is open."""
    count = shape.num_elements()
    return int(count * dtype.size) if count is not None else 0
