"""Write the nodes that a specialised graph has in place of others."""

from collections.abc import Iterable
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import node_def_pb2

CONSTANT, FILL, SHAPE = "Const", "Fill", "Shape"
INT32 = tf.int32.as_datatype_enum


def constant(name: str, value: Any, device: str) -> Any:
    """Return a constant of a ``TensorProto``."""
    node = node_def_pb2.NodeDef(name=name, op=CONSTANT, device=device)
    node.attr["dtype"].type = value.dtype
    node.attr["value"].tensor.CopyFrom(value)
    return node


def shape_of(name: str, text: str, dtype: int, device: str) -> Any:
    """Return a node that tells the shape of an output, which is named as inputs are."""
    node = node_def_pb2.NodeDef(name=name, op=SHAPE, device=device, input=[text])
    node.attr["T"].type, node.attr["out_type"].type = dtype, INT32
    return node


def turn_into_fill(node: Any, dims: str, value: str, dtype: int, waits: Iterable[str]) -> None:
    """Have a node make a tensor of one value; it waits for the nodes called ``waits``."""
    node.op = FILL
    node.attr.clear()
    node.attr["T"].type, node.attr["index_type"].type = dtype, INT32
    del node.input[:]
    node.input.extend([dims, value, *(f"^{name}" for name in waits)])
