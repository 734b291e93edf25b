"""Adds a copy to a graph: an op with one input and one output, both of type ``T``."""

from typing import Any

import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2


def add_copy(op_type: str, tensor: Any, device: str, name: str) -> Any:
    """The output of a new op of the current graph; ``device`` may be empty.

    The graph is asked directly: the wrapper that TensorFlow generates for an op takes as long again, so does
    the deprecation notice around ``create_op``, and a step of some thousand ops gets a thousand copies.
    """
    if device:
        with tf.device(device):
            return add_copy(op_type, tensor, "", name)
    dtype = tensor.dtype
    attrs = {"T": attr_value_pb2.AttrValue(type=dtype.as_datatype_enum)}
    graph = tf.compat.v1.get_default_graph()
    return graph._create_op_internal(op_type, [tensor], [dtype], name=name, attrs=attrs).outputs[0]
