"""Describe a node by plain values: the sizes of what it reads and makes, and what its kernel depends on."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import kernels

from lms.device.kernels import OpFacts, Reader, Shape
from lms.optimizer.grappler_item import Output
from lms.reader.node_table import NodeTable

NOT_PLAIN = frozenset(dtype.as_datatype_enum for dtype in (tf.resource, tf.variant, tf.string))


@functools.cache
def item_bytes(dtype: int) -> int:
    """Return the bytes of an element of a type, which TensorFlow numbers; 0 where its memory is not plain."""
    return 0 if dtype in NOT_PLAIN or not dtype else int(tf.as_dtype(dtype).size)


@functools.lru_cache(maxsize=4096)
def size_of(output: Output) -> int | None:
    """Return the bytes of an output: 0 where its memory is not plain, ``None`` where its shape is open."""
    item = item_bytes(output.dtype)
    if not item:
        return 0
    if output.dims is None:
        return None
    total = item
    for dim in output.dims:
        if dim < 0:
            return None
        total *= dim
    return total


@functools.lru_cache(maxsize=4096)
def shape_of(output: Output) -> Shape:
    """Return the dimensions of an output, ``None`` for one of open size."""
    return None if output.dims is None else tuple(None if dim < 0 else dim for dim in output.dims)


@functools.cache
def has_kernel(op_type: str, device_type: str, dtype: int, attr: str = "T") -> bool:
    """Tell whether TensorFlow runs an op of this data type, an attribute of it, on such a device."""
    for kernel in kernels.get_registered_kernels_for_op(op_type).kernel:
        if kernel.device_type in (device_type, "DEFAULT"):
            taken = {one.name: one.allowed_values.list.type for one in kernel.constraint}
            if dtype in taken.get(attr, (dtype,)):
                return True
    return False


def facts_of(table: NodeTable, outputs: Sequence[Sequence[Output]], node: int) -> OpFacts:
    """Describe a node by the facts that the kernels of a device depend on."""
    read = [outputs[source.node][source.index] for source in table.inputs[node]]
    readers = ((one, slot) for one, slot in table.readers[node] if table.inputs[one][slot].index == 0)
    return OpFacts(
        type=table.types[node],
        input_bytes=tuple(map(size_of, read)),
        output_bytes=tuple(map(size_of, outputs[node])),
        input_shapes=tuple(map(shape_of, read)),
        output_shapes=tuple(map(shape_of, outputs[node])),
        attrs=_Attrs(table, node),
        readers=tuple(Reader(table.types[one], slot) for one, slot in readers),
        makers=tuple(table.types[source.node] for source in table.inputs[node]),
    )


def merged_types(op_type: str, node: Any) -> tuple[str, ...]:
    """Return the types of the ops that TensorFlow's remapper has merged into one."""
    if not op_type.startswith("_Fused"):
        return ()
    if op_type == "_FusedBatchNormEx":
        return "FusedBatchNormV3", node.attr["activation_mode"].s.decode()
    return op_type.removeprefix("_Fused"), *(one.decode() for one in node.attr["fused_ops"].list.s)


class _Attrs(Mapping[str, object]):
    """The attributes of a node as plain values, each read when it is asked for."""

    def __init__(self, table: NodeTable, node: int) -> None:
        self._table, self._node = table, node

    def __getitem__(self, name: str) -> object:
        found = self._table.attr(self._node, name)
        if found is None:
            raise KeyError(name)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._table.nodes[self._node].attr)

    def __len__(self) -> int:
        return len(self._table.nodes[self._node].attr)
