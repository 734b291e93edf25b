"""Completes the shapes of a graph that was traced with open dimensions, so that its memory can be planned.

A copy of the graph is imported with its arguments' shapes pinned; TensorFlow's own shape inference does the
rest. The graph itself keeps its open dimensions: a smaller last batch runs through the same edited graph.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import graph_pb2
from tensorflow.python.client import pywrap_tf_session as c_api
from tensorflow.python.data.ops.dataset_ops import UnaryUnchangedStructureDataset
from tensorflow.python.framework import c_api_util
from tensorflow.python.ops import handle_data_util

from lms.errors import UnreadableError
from lms.tf_graph import RESERVE, RESERVING

Dims = tuple[int | None, ...]

PLACEHOLDERS = ("Placeholder", "PlaceholderWithDefault")
"""Where a session feeds values. What the second gives unless it is fed may have another size."""

BATCH_SIZES = ("_batch_size", "_batch_size_t")
"""What a batching step of a pipeline has; the second that of ``map_and_batch``, which maps first."""


@dataclass(frozen=True)
class ShapeHints:
    """What is known about the arguments of the call that made TensorFlow trace a graph."""

    calls: tuple[tuple[int, ...], ...] = ()
    """Shapes of the tensors in the first real call."""
    batch_size: int | None = None
    """Size of an open leading dimension."""
    feeds: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Shapes of what a session feeds, by the name of the placeholder's op."""

    def pin(self, dims: Dims) -> Dims:
        """``dims`` with what is open filled in: from an argument of the call, else by the batch size."""
        if None not in dims:
            return dims
        fitting = next((call for call in self.calls if _fits(call, dims)), None)
        return fitting or (self.batch_size if dims[0] is None else dims[0], *dims[1:])

    def pin_all(self, arguments: Mapping[str, Dims]) -> dict[str, Dims]:
        """A graph's arguments, in their order, each pinned to what is fed for it, else from the call.

        What a call gives has no names: each argument takes the first that is left and fits.
        """
        left, pinned = list(self.calls), {}
        for name, dims in arguments.items():
            found = self._fed(name, dims) or next((call for call in left if _fits(call, dims)), None)
            if found in left:
                left.remove(found)
            pinned[name] = found or self.pin(dims)
        return pinned

    def _fed(self, name: str, dims: Dims) -> tuple[int, ...] | None:
        fed = self.feeds.get(name)
        return fed if fed is not None and _fits(fed, dims) else None


def _fits(call: tuple[int, ...], dims: Dims) -> bool:
    return len(call) == len(dims) and all(d is None or d == c for d, c in zip(dims, call, strict=True))


def complete_shapes(tf_graph: Any, hints: ShapeHints) -> dict[str, Dims]:
    """Shapes by tensor name of the tensors whose own shape is open, as far as ``hints`` decide them.

    Args:
        tf_graph: The traced graph; it is not changed.
        hints: What is known about its arguments.

    Raises:
        UnreadableError: If the shapes of the call contradict the graph.
    """
    open_tensors = [
        tensor
        for op in tf_graph.get_operations()
        for tensor in op.outputs
        if not tensor.shape.is_fully_defined() and tensor.dtype != tf.resource
    ]
    found: dict[str, Dims] = {tensor.name: (0,) for tensor in open_tensors if _is_reserve(tensor)}
    asked = [tensor for tensor in open_tensors if tensor.name not in found]
    if not asked:
        return found
    copies = _import_pinned(tf_graph, _Excerpt.around(asked), hints)
    for tensor in asked:
        op, _, index = tensor.name.rpartition(":")
        shape = copies[op].outputs[int(index)].shape
        if shape.rank is not None:
            found[tensor.name] = tuple(shape.as_list())
    return found


def _is_reserve(tensor: Any) -> bool:
    """Whether this is batch normalisation's note to itself, or the zeros that stand for its gradient.

    Its shape is open for good. The note is empty but for cuDNN's, and nobody reads the zeros.
    """
    made = tensor.op.inputs[0] if tensor.op.type == "ZerosLike" else tensor
    return bool(made.op.type == RESERVING and made.value_index == RESERVE)


@dataclass(frozen=True)
class _Excerpt:
    """The part of a graph that decides its open shapes; importing less of it is most of the time saved."""

    whole: Sequence[Any]
    """Ops to take as they are."""
    leaves: Sequence[Any]
    """Tensors of known shape, each its op's only output, whose value decides no shape: taken as arguments."""

    @classmethod
    def around(cls, tensors: Iterable[Any]) -> "_Excerpt":
        whole: dict[Any, None] = {}
        leaves: dict[Any, Any] = {}
        waiting = [tensor.op for tensor in tensors]
        while waiting:
            op = waiting.pop()
            if op in whole:
                continue
            whole[op] = None
            for tensor in op.inputs:
                maker = tensor.op
                if tensor.dtype.is_floating and len(maker.outputs) == 1 and tensor.shape.is_fully_defined():
                    leaves[maker] = tensor
                elif maker not in whole:
                    waiting.append(maker)
        return cls(tuple(whole), tuple(leaf for maker, leaf in leaves.items() if maker not in whole))


def _import_pinned(tf_graph: Any, excerpt: _Excerpt, hints: ShapeHints) -> dict[str, Any]:
    """By name the ops of a copy of the excerpt, with pinned arguments."""
    definition = graph_pb2.GraphDef(versions=tf_graph.graph_def_versions)
    tf_graph._copy_functions_to_graph_def(definition, 0)
    stand_ins = _add_stand_ins(definition, excerpt.leaves)
    arguments = hints.pin_all(_arguments(tf_graph))
    for op in excerpt.whole:
        _take(definition.node.add(), op, stand_ins, hints, arguments)
    copy = tf.Graph()
    with copy.as_default():
        handles = _handles(excerpt)
    return _import_ops(copy, definition, handles)


def _add_stand_ins(definition: Any, leaves: Iterable[Any]) -> dict[str, str]:
    """Add an argument for each kind of leaf; which one, by the name of the leaf's op.

    Leaves of one type and shape share it: a third of what would be imported are leaves, most of them weights.
    """
    arguments: dict[tuple[int, Dims], str] = {}
    stand_ins: dict[str, str] = {}
    for leaf in leaves:
        kind = leaf.dtype.as_datatype_enum, tuple(leaf.shape.as_list())
        name = stand_ins[leaf.op.name] = arguments.setdefault(kind, leaf.op.name)
        if name == leaf.op.name:
            argument = definition.node.add(name=name, op="Placeholder")
            argument.attr["dtype"].type = leaf.dtype.as_datatype_enum
            argument.attr["shape"].shape.CopyFrom(leaf.shape.as_proto())
    return stand_ins


def _arguments(tf_graph: Any) -> dict[str, Dims]:
    """By name the shapes of a graph's placeholders of plain tensors, in the order in which they were made."""
    return {
        op.name: tuple(op.outputs[0].shape.as_list())
        for op in tf_graph.get_operations()
        if op.type in PLACEHOLDERS
        and op.outputs[0].dtype != tf.resource
        and op.outputs[0].shape.rank is not None
    }


def _import_ops(copy: Any, definition: Any, handles: Mapping[str, Any]) -> dict[str, Any]:
    """Import into ``copy`` with TensorFlow's C library alone.

    ``tf.graph_util.import_graph_def`` spends most of its time on devices, colocation and control flow of
    the new ops, which no shape depends on.
    """
    options = c_api_util.ScopedTFImportGraphDefOptions()
    for name, handle in handles.items():
        op, _, index = name.rpartition(":")
        c_api.TF_ImportGraphDefOptionsAddInputMapping(options.options, op, int(index), handle._as_tf_output())
    c_api.TF_ImportGraphDefOptionsSetValidateColocationConstraints(options.options, False)
    with copy._c_graph.get() as c_graph, c_api_util.tf_buffer(definition.SerializeToString()) as data:
        try:
            results = c_api.TF_GraphImportGraphDefWithResults(c_graph, data, options.options)
        except tf.errors.OpError as error:
            reason = error.message.partition("\n")[0]
            raise UnreadableError(
                f"its open shapes cannot be completed from those of the call ({reason}); "
                "give its arguments shapes, or set LMS_BATCH_SIZE"
            ) from error
        c_api_util.ScopedTFImportGraphDefResults(results)  # frees them
    made = (tf.Operation._from_c_op(c_op, copy) for c_op in copy.new_operations())
    return {op.name: op for op in made}


def _take(
    taken: Any, op: Any, stand_ins: Mapping[str, str], hints: ShapeHints, arguments: Mapping[str, Dims]
) -> None:
    taken.MergeFromString(op._node_def)
    data = [stand_ins.get(name, name) for name in taken.input if not name.startswith("^")]
    taken.input[:] = data
    for attr in ("_output_shapes", "_class"):
        taken.attr.pop(attr, None)
    if taken.op in PLACEHOLDERS:
        taken.op = "Placeholder"
        del taken.input[:]
    if taken.name in arguments and "shape" in taken.attr:
        _write(taken.attr["shape"].shape, arguments[taken.name])
    if "output_shapes" in taken.attr and "output_types" in taken.attr:
        shapes = {
            f":{index}": shape
            for index, shape in enumerate(taken.attr["output_shapes"].list.shape)
            if shape.dim and not shape.unknown_rank
        }
        pinned = hints.pin_all({name: _dims(shape) for name, shape in shapes.items()})
        for name, shape in shapes.items():
            _write(shape, pinned[name])


def _dims(shape: Any) -> Dims:
    return tuple(None if dim.size < 0 else dim.size for dim in shape.dim)


def _write(shape: Any, dims: Dims) -> None:
    for dim, size in zip(shape.dim, dims, strict=True):
        dim.size = -1 if size is None else size


def _handles(excerpt: _Excerpt) -> dict[str, Any]:
    """Stand-ins for the variables' handles that know what they point to, which a GraphDef forgets."""
    handles: dict[str, Any] = {}
    for op in excerpt.whole:
        if op.type in ("Placeholder", "VarHandleOp") and op.outputs[0].dtype == tf.resource:
            handle = op.outputs[0]
            stand_in = tf.compat.v1.placeholder(tf.resource, handle.shape, name=f"lms/handle_{len(handles)}")
            handle_data_util.copy_handle_data(handle, stand_in)
            handles[handle.name] = stand_in
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
        if _is_batching(dataset):
            return _own_batch_size(dataset)
        dataset = getattr(dataset, "_input_dataset", None)
        if dataset is None:
            return None
    return None


def gone_through_batch_size(datasets: Sequence[Any]) -> int | None:
    """The batch size of the datasets that a function goes through itself (``for batch in dataset``).

    No batch can be looked at before the step: a pipeline may be costly, or never give the same again. So all
    that stands behind the batching step must be known to keep its size; ``None`` where it is not, or where
    two datasets differ.
    """
    sizes = {_kept_batch_size(dataset) for dataset in datasets}
    return sizes.pop() if len(sizes) == 1 else None


def _kept_batch_size(dataset: Any) -> int | None:
    """The size of a dataset's whole batches; a smaller last one runs through the same graph."""
    if isinstance(dataset, UnaryUnchangedStructureDataset):  # prefetches, shuffles, repeats, ...
        return _kept_batch_size(dataset._input_dataset)
    if hasattr(dataset, "_map_func") and not _is_batching(dataset):
        size = _kept_batch_size(getattr(dataset, "_input_dataset", None))
        graph = dataset._map_func.function.graph
        return size if size is not None and _keeps_size(graph, size) else None
    return _own_batch_size(dataset)


def _is_batching(dataset: Any) -> bool:
    return any(hasattr(dataset, name) for name in BATCH_SIZES)


def _own_batch_size(dataset: Any) -> int | None:
    """The size of the batches that this step of a pipeline makes itself."""
    sizes = (tf.get_static_value(getattr(dataset, name, None)) for name in BATCH_SIZES)
    return next((int(size) for size in sizes if size is not None), None)


def _keeps_size(graph: Any, size: int) -> bool:
    """Whether what ``graph`` makes of batches of ``size`` has so many rows again, in each of its outputs."""
    try:
        known = complete_shapes(graph, ShapeHints(batch_size=size))
    except UnreadableError:
        return False
    shapes = (known.get(output.name, output.shape) for output in graph.outputs)
    return all(tf.TensorShape(shape).rank and shape[0] == size for shape in shapes)


def static_bytes(shape: Any, dtype: Any) -> int:
    """Bytes of a tensor of this shape; 0 while the shape is open."""
    count = shape.num_elements()
    return int(count * dtype.size) if count is not None else 0
