"""Completes the shapes of a graph that was traced with open dimensions, so that its memory can be planned.

A copy of the graph is imported with its arguments' shapes pinned; TensorFlow's own shape inference does the
rest. The graph itself keeps its open dimensions: a smaller last batch runs through the same edited graph.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from tensorflow.python.ops import handle_data_util

Dims = tuple[int | None, ...]


@dataclass(frozen=True)
class ShapeHints:
    """What is known about the arguments of the call that made TensorFlow trace a graph."""

    calls: tuple[tuple[int, ...], ...] = ()
    """Shapes of the tensors in the first real call."""
    batch_size: int | None = None
    """Size of an open leading dimension."""

    def pin(self, dims: Dims) -> Dims:
        """``dims`` with what is open filled in: from an argument of the call, else by the batch size."""
        if None not in dims:
            return dims
        for call in self.calls:
            if len(call) == len(dims) and all(d is None or d == c for d, c in zip(dims, call, strict=True)):
                return call
        return (self.batch_size if dims[0] is None else dims[0], *dims[1:])


def complete_shapes(tf_graph: Any, hints: ShapeHints) -> dict[str, Dims]:
    """Shapes by tensor name of the tensors whose own shape is open, as far as ``hints`` decide them.

    Args:
        tf_graph: The traced graph; it is not changed.
        hints: What is known about its arguments.
    """
    open_tensors = [
        tensor
        for op in tf_graph.get_operations()
        for tensor in op.outputs
        if tensor.dtype != tf.resource and not tensor.shape.is_fully_defined()
    ]
    if not open_tensors:
        return {}
    copy = _import_pinned(tf_graph, _Excerpt.around(open_tensors), hints)
    found = {tensor.name: copy.get_tensor_by_name(tensor.name).shape for tensor in open_tensors}
    return {name: tuple(shape.as_list()) for name, shape in found.items() if shape.rank is not None}


@dataclass(frozen=True)
class _Excerpt:
    """The part of a graph that decides its open shapes; importing less of it is most of the time saved."""

    whole: frozenset[str]
    """Ops to take as they are."""
    leaves: dict[str, Any]
    """Ops whose only output's shape is known, and whose value decides no shape: taken as arguments."""

    @classmethod
    def around(cls, tensors: Iterable[Any]) -> "_Excerpt":
        whole: set[str] = set()
        leaves: dict[str, Any] = {}
        waiting = [tensor.op for tensor in tensors]
        while waiting:
            op = waiting.pop()
            if op.name in whole:
                continue
            whole.add(op.name)
            for tensor in op.inputs:
                maker = tensor.op
                if tensor.dtype.is_floating and len(maker.outputs) == 1 and tensor.shape.is_fully_defined():
                    leaves[maker.name] = tensor
                elif maker.name not in whole:
                    waiting.append(maker)
        return cls(frozenset(whole), {name: leaf for name, leaf in leaves.items() if name not in whole})


def _import_pinned(tf_graph: Any, excerpt: _Excerpt, hints: ShapeHints) -> Any:
    complete = tf_graph.as_graph_def()
    definition = type(complete)(versions=complete.versions, library=complete.library)
    for node in complete.node:
        if node.name in excerpt.leaves:
            leaf = excerpt.leaves[node.name]
            argument = definition.node.add(name=node.name, op="Placeholder")
            argument.attr["dtype"].type = leaf.dtype.as_datatype_enum
            argument.attr["shape"].shape.CopyFrom(leaf.shape.as_proto())
        elif node.name in excerpt.whole:
            _take(definition.node.add(), node, hints)
    copy = tf.Graph()
    with copy.as_default():
        tf.graph_util.import_graph_def(definition, input_map=_handles(tf_graph, excerpt), name="")
    return copy


def _take(taken: Any, node: Any, hints: ShapeHints) -> None:
    taken.CopyFrom(node)
    taken.attr.pop("_output_shapes", None)
    data = [name for name in taken.input if not name.startswith("^")]
    del taken.input[:]
    taken.input.extend(data)
    taken.attr.pop("_class", None)
    if taken.op == "Placeholder" and "shape" in taken.attr:
        _pin(taken.attr["shape"].shape, hints)
    if "output_shapes" in taken.attr and "output_types" in taken.attr:
        for shape in taken.attr["output_shapes"].list.shape:
            _pin(shape, hints)


def _pin(shape: Any, hints: ShapeHints) -> None:
    if shape.unknown_rank or not shape.dim:
        return
    dims = tuple(None if dim.size < 0 else dim.size for dim in shape.dim)
    for dim, size in zip(shape.dim, hints.pin(dims), strict=True):
        dim.size = -1 if size is None else size


def _handles(tf_graph: Any, excerpt: _Excerpt) -> dict[str, Any]:
    """Stand-ins for the variables' handles that know what they point to, which a GraphDef forgets."""
    handles: dict[str, Any] = {}
    for name in sorted(excerpt.whole):
        op = tf_graph.get_operation_by_name(name)
        if op.type in ("Placeholder", "VarHandleOp") and op.outputs[0].dtype == tf.resource:
            stand_in = tf.compat.v1.placeholder(
                tf.resource, op.outputs[0].shape, name=f"handle_{len(handles)}"
            )
            handle_data_util.copy_handle_data(op.outputs[0], stand_in)
            handles[op.outputs[0].name] = stand_in
    return handles


def argument_shapes(arguments: Iterable[Any]) -> tuple[tuple[int, ...], ...]:
    """Shapes of the tensors and arrays among the flattened ``arguments`` of a call."""
    shapes = []
    for argument in arguments:
        shape = getattr(argument, "shape", None)
        dims = shape.as_list() if isinstance(shape, tf.TensorShape) and shape.rank is not None else shape
        if isinstance(dims, Sequence) and all(isinstance(dim, int) for dim in dims):
            shapes.append(tuple(dims))
    return tuple(shapes)


def dataset_batch_size(dataset: Any) -> int | None:
    """The batch size that a ``tf.data`` pipeline was built with, when its last batching step says it."""
    for _ in range(64):
        size = getattr(dataset, "_batch_size", None)
        if size is not None:
            value = tf.get_static_value(size)
            return None if value is None else int(value)
        dataset = getattr(dataset, "_input_dataset", None)
        if dataset is None:
            return None
    return None


def static_bytes(shape: Any, dtype: Any) -> int:
    """Bytes of a tensor of this shape; 0 while the shape is open."""
    count = shape.num_elements()
    return int(count * dtype.size) if count is not None else 0
