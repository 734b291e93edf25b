"""Complete the shapes of a graph's outputs where the trace has left dimensions open.

TensorFlow infers the shapes. Where they hang on a batch whose size is open, the known sizes are filled in at
the sources of a copy, and TensorFlow infers again. What an op computes from shapes it does not see through;
but reshaping a tensor keeps the number of its elements, which settles most of the rest. For what is
left TensorFlow builds the graph anew, with the known shapes as constants, and computes, node by node, what
depends on them alone: a second for eight thousand nodes, several times as long. The graph itself keeps its
open dimensions: a smaller last batch runs through the same edited graph.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import graph_pb2
from tensorflow.core.protobuf import meta_graph_pb2
from tensorflow.python.grappler import item as grappler_item

from lms.device.kernels import RESERVE, RESERVING
from lms.errors import UnreadableError
from lms.ir.op_traits import MERGES
from lms.optimizer.grappler_item import Output
from lms.reader.called_functions import take_in_calls
from lms.reader.cut_loops import cut_loops, turns_keep_shapes
from lms.reader.node_table import NodeTable

Dims = tuple[int | None, ...]

PLACEHOLDERS = ("Placeholder", "PlaceholderWithDefault")
"""Where a session feeds values. What the second gives unless it is fed may have another size."""

ARGUMENT = "_Arg"
ARGUMENT_SHAPES = "_output_shapes"
"""Where TensorFlow keeps the shape of an argument (``REGISTER_SYSTEM_OP("_Arg")`` in function_ops.cc)."""

RESHAPING = frozenset({"ExpandDims", "Reshape", "Squeeze"})
"""Ops that keep the elements of their first input."""
UNNAMED = -1
"""A dimension of which TensorFlow knows nothing, not even that it equals another one."""
TINY = frozenset({"BroadcastGradientArgs", "ConcatOffset", "InvertPermutation", "Rank", "Shape", "Size"})
"""Ops whose outputs are a few numbers, however open their shapes are."""

SHAPES = frozenset({"Shape", "ShapeN"})
"""Ops whose outputs are the shapes of their inputs."""

KNOWN_SOURCE = "ImmutableConst"
"""An op without inputs whose shape is an attribute, which nothing folds; none of them is ever run."""

PLAIN_KINDS = frozenset({tf.resource.as_datatype_enum, tf.variant.as_datatype_enum})


@dataclass(frozen=True)
class ShapeHints:
    """The shapes that are known of the call for which TensorFlow optimizes a graph."""

    arguments: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """Shapes of what the function is called with, by the number of the argument."""
    batches: tuple[tuple[int, ...], ...] = ()
    """Shapes of the next batches of the iterators among the arguments."""
    batch_size: int | None = None
    """Size of an open leading dimension."""
    feeds: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Shapes of what a session feeds, by its name as a node reads it: ``x`` for output 0, or ``x:1``."""
    values: Mapping[int, Any] = field(default_factory=dict)
    """Arguments that never change, as arrays of integers, by number: they may decide sizes."""

    @property
    def knows_batch(self) -> bool:
        """Whether a size of the batch is known."""
        shapes = (*self.arguments.values(), *self.batches, *self.feeds.values())
        return self.batch_size is not None or any(shapes)

    def pin(self, dims: Dims) -> Dims:
        """Fill in the open sizes of ``dims``: from a batch that fits, else by the batch size."""
        if None not in dims:
            return dims
        fitting = next((batch for batch in self.batches if _fits(batch, dims)), None)
        return fitting or (self.batch_size if dims[0] is None else dims[0], *dims[1:])

    def pin_all(self, shapes: Sequence[Dims]) -> list[Dims]:
        """Pin the shapes of an iterator's outputs, each to the first batch left that fits.

        Batches have no names.
        """
        left, pinned = list(self.batches), []
        for dims in shapes:
            found = next((batch for batch in left if None in dims and _fits(batch, dims)), None)
            if found is not None:
                left.remove(found)
            pinned.append(found or self.pin(dims))
        return pinned


def _fits(known: tuple[int, ...], dims: Dims) -> bool:
    return len(known) == len(dims) and all(d is None or d == k for d, k in zip(dims, known, strict=True))


@lru_cache(maxsize=4096)
def is_open(output: Output) -> bool:
    """Tell whether the size of an output is unknown."""
    return output.dtype not in PLAIN_KINDS and (output.dims is None or any(dim < 0 for dim in output.dims))


def complete_shapes(
    graph_def: Any, table: NodeTable, outputs: Sequence[Sequence[Output]], hints: ShapeHints
) -> Sequence[Sequence[Output]]:
    """Complete the shapes of a graph, as far as ``hints`` decide them.

    Args:
        graph_def: The graph; it is not changed.
        table: The graph as a table.
        outputs: Type and shape of the outputs of each node, as TensorFlow infers them.
        hints: What is known about its arguments.

    Raises:
        UnreadableError: If the shapes of the call contradict the graph.
    """
    if not _open_nodes(table, outputs):
        return outputs
    copy = graph_pb2.GraphDef()
    copy.CopyFrom(graph_def)
    inferred = outputs
    has_changed, cut = any([_pin(copy, hints), take_in_calls(copy), _leave_out_empty(copy)]), None
    if len(table.frames) > 1 and (cut := _cut_open(copy, table)) is not None:
        copy, known = cut
        inferred = _closed(table, outputs, known)
        outputs = settle_elements(table, inferred)
    elif has_changed:
        inferred = _closed(table, outputs, _inferred(copy, table))
        outputs = settle_elements(table, inferred)
    elif not _knows_sources(table, outputs):
        return outputs
    if _open_nodes(table, outputs):
        with suppress(tf.errors.OpError, KeyError, ValueError, RuntimeError):  # else they stay open
            _state_known_shapes(copy, table, inferred)  # what is settled has its elements, not its shape
            return _closed(table, outputs, _infer_by_building(copy))
    return outputs


def _cut_open(graph_def: Any, table: NodeTable) -> tuple[Any, dict[str, list[Output]]] | None:
    """Return the graph with its loops cut open, and what TensorFlow infers for that.

    ``None`` where a turn may change the shapes that it begins with.
    """
    cut = graph_pb2.GraphDef()
    cut.CopyFrom(graph_def)
    turns = cut_loops(cut)
    try:
        known = infer(cut, _ends(table))
    except (tf.errors.OpError, ValueError, RuntimeError):
        return None
    return (cut, known) if turns_keep_shapes(turns, known) else None


def _ends(table: NodeTable) -> list[str]:
    """Return the name of a node for which TensorFlow infers the shapes of all."""
    return [name for name, kind in zip(table.names, table.types, strict=True) if kind != ARGUMENT][-1:]


def _inferred(graph_def: Any, table: NodeTable) -> dict[str, list[Output]]:
    """Return what TensorFlow infers once the sources are known.

    Raises:
        UnreadableError: If the shapes of the call contradict the graph.
    """
    try:
        return infer(graph_def, _ends(table))
    except (tf.errors.OpError, ValueError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise UnreadableError(
            f"its open shapes cannot be completed from those of the call ({reason}); "
            "give its arguments shapes, or set LMS_BATCH_SIZE"
        ) from error


def _knows_sources(table: NodeTable, outputs: Sequence[Sequence[Output]]) -> bool:
    """Tell whether all sizes are known where tensors enter the graph: then the others can be computed."""
    return not any(
        is_open(output)
        for node, made in enumerate(outputs)
        if not table.inputs[node] or "output_shapes" in table.nodes[node].attr
        for output in made
    )


def _open_nodes(table: NodeTable, outputs: Sequence[Sequence[Output]]) -> bool:
    """Tell whether any output has an open size.

    Tiny outputs do not count. Nor do the notes of normalisations for their gradients: kernels know them.
    """
    return any(
        is_open(output)
        for op_type, made in zip(table.types, outputs, strict=True)
        if op_type not in TINY
        for output in (made[:RESERVE] if op_type in RESERVING else made)
    )


def _closed(
    table: NodeTable, outputs: Sequence[Sequence[Output]], known: Mapping[str, Sequence[Output]]
) -> Sequence[Sequence[Output]]:
    """Replace open outputs by what is known of them under the node's name."""
    return [
        _better(made, known.get(name, ())) if any(map(is_open, made)) else made
        for name, made in zip(table.names, outputs, strict=True)
    ]


def _better(made: Sequence[Output], known: Sequence[Output]) -> Sequence[Output]:
    if len(known) < len(made):
        return made
    return [
        Output(output.dtype, found.dims) if is_open(output) and found.dims is not None else output
        for output, found in zip(made, known, strict=False)
    ]


def settle_elements(table: NodeTable, outputs: Sequence[Sequence[Output]]) -> Sequence[Sequence[Output]]:
    """Settle open sizes by what reshaping keeps: the number of elements.

    TensorFlow gives dimensions of which it knows that they are equal the same number below -1. Where a size
    is settled and its dimensions are not, the output gets one dimension with all its elements.
    """
    elements = _Elements()
    moves = [
        (table.inputs[node][0], node)
        for node in table.order
        if table.types[node] in RESHAPING and table.inputs[node] and outputs[node]
    ]
    while any([elements.keep(outputs[source.node][source.index], outputs[to][0]) for source, to in moves]):
        pass
    return [
        [elements.settled(output) if is_open(output) else output for output in made]
        if any(map(is_open, made))
        else made
        for made in outputs
    ]


class _Elements:
    """Keeps the open dimensions, and products of open dimensions, that are known."""

    def __init__(self) -> None:
        self._products: dict[tuple[int, ...], int] = {}

    def keep(self, one: Output, other: Output) -> bool:
        """Learn that two outputs have equally many elements; tell whether that was new."""
        if one.dims is None or other.dims is None:
            return False
        (count, rest), (other_count, other_rest) = self._split(one.dims), self._split(other.dims)
        if not rest and other_rest and other_count:
            self._products[other_rest] = count // other_count
        elif rest and not other_rest and count:
            self._products[rest] = other_count // count
        else:
            return False
        return True

    def settled(self, output: Output) -> Output:
        """Return the output with the known dimensions filled in."""
        if output.dims is None:
            return output
        dims = tuple(self._products.get((dim,), dim) if dim < 0 else dim for dim in output.dims)
        if min(dims) >= 0:
            return Output(output.dtype, dims)
        count, rest = self._split(dims)
        return output if rest else Output(output.dtype, (count,))

    def _split(self, dims: Sequence[int]) -> tuple[int, tuple[int, ...]]:
        """Return the product of the known dimensions, and the open ones, sorted.

        A dimension of number :data:`UNNAMED` stays open for good.
        """
        count = 1
        rest = []
        for dim in dims:
            size = self._products.get((dim,), dim)
            if size >= 0:
                count *= size
            else:
                rest.append(size)
        key = tuple(sorted(rest))
        known = self._products.get(key) if UNNAMED not in key else None
        return (count, key) if known is None else (count * known, ())


BOUND = ("_class", ARGUMENT_SHAPES)
"""Attributes that hold for the whole graph, with its devices and arguments."""


def _state_known_shapes(graph_def: Any, table: NodeTable, outputs: Sequence[Sequence[Output]]) -> None:
    """Put constants in place of known shapes: TensorFlow does not see through all ops that read shapes."""
    stated: dict[str, str] = {}
    for node, op_type in enumerate(table.types):
        if op_type not in SHAPES:
            continue
        for slot, source in enumerate(table.inputs[node]):
            dims = outputs[source.node][source.index].dims
            if dims is None or min(dims, default=0) < 0:
                continue
            dtype = tf.as_dtype(outputs[node][slot].dtype)
            made = graph_def.node.add(op="Const", name=f"{table.names[node]}/known_{slot}")
            made.attr["dtype"].type = dtype.as_datatype_enum
            made.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(dims, dtype, (len(dims),)))
            stated[f"{table.names[node]}:{slot}" if slot else table.names[node]] = made.name
    for one in graph_def.node:
        for slot, name in enumerate(one.input):
            if name in stated:
                one.input[slot] = stated[name]


def _infer_by_building(graph_def: Any) -> dict[str, list[Output]]:
    """Return the shapes TensorFlow infers while it builds the graph, by node; changes ``graph_def``."""
    del graph_def.library.function[:]  # the names alone, which it would not take
    for node in graph_def.node:
        node.device = ""
        for name in BOUND:
            node.attr.pop(name, None)
    with tf.Graph().as_default() as built:
        tf.graph_util.import_graph_def(graph_def, name="")
    return {
        op.name: [Output(one.dtype.as_datatype_enum, _sizes(one.shape)) for one in op.outputs]
        for op in built.get_operations()
    }


def _sizes(shape: Any) -> tuple[int, ...] | None:
    """Return the sizes of a ``TensorShape``; as TensorFlow 1 behaves, it would yield objects itself."""
    return None if shape.rank is None else tuple(-1 if dim is None else dim for dim in shape.as_list())


def _pin(graph_def: Any, hints: ShapeHints) -> bool:
    """Fill in what is known at the sources of a graph; tell whether anything was."""
    changed = False
    for node in graph_def.node:
        if node.op == ARGUMENT:
            number = node.attr["index"].i
            if number in hints.values and _has_type(hints.values[number], node.attr["T"].type):
                _make_constant(node, hints.values[number])
                changed = True
                continue
            given = hints.arguments.get(number)
            shapes = node.attr[ARGUMENT_SHAPES].list.shape
            dtype = node.attr["T"].type
            changed |= dtype not in PLAIN_KINDS and _fix(
                node, dtype, shapes[0] if shapes else None, given, hints
            )
        elif node.op in PLACEHOLDERS:
            given = hints.feeds.get(node.name)
            changed |= _fix(node, node.attr["dtype"].type, node.attr["shape"].shape, given, hints)
        elif "output_shapes" in node.attr and "output_types" in node.attr:
            listed = []
            for index, shape in enumerate(node.attr["output_shapes"].list.shape):
                given = hints.feeds.get(f"{node.name}:{index}" if index else node.name)
                if given is not None and not shape.unknown_rank and _fits(given, _dims(shape)):
                    _write(shape, given)
                    changed = True  # TensorFlow infers nothing from what is fed
                elif shape.dim and not shape.unknown_rank:
                    listed.append(shape)
            for shape, dims in zip(listed, hints.pin_all(list(map(_dims, listed))), strict=True):
                changed |= _write(shape, dims)
    return changed


def _leave_out_empty(graph_def: Any) -> bool:
    """Have branches that give nothing decide no size; tell whether there are any.

    An iterator of several devices gives an empty batch to a device for which none is left.
    """
    empty = {node.name for node in graph_def.node if node.op == "Const" and _is_empty(node)}
    changed = False
    for node in graph_def.node if empty else ():
        if node.op in MERGES and (
            full := [name for name in node.input if name.partition(":")[0] not in empty]
        ):
            count = sum(not name.startswith("^") for name in full)
            if 0 < count < node.attr["N"].i:
                node.input[:], node.attr["N"].i = full, count
                changed = True
    return changed


def _is_empty(node: Any) -> bool:
    return any(dim.size == 0 for dim in node.attr["value"].tensor.tensor_shape.dim)


def _fix(node: Any, dtype: int, shape: Any, given: tuple[int, ...] | None, hints: ShapeHints) -> bool:
    """Replace a node by a source of known shape; tell whether the shape is known.

    TensorFlow infers nothing here from a placeholder or an argument, whatever shape it states.
    """
    known = None if shape is None or shape.unknown_rank else _dims(shape)
    dims = given if given is not None and (known is None or _fits(given, known)) else known
    dims = None if dims is None else hints.pin(dims)
    if dims is None or None in dims:
        return False
    make_known(node, dtype, [size for size in dims if size is not None])
    return True


def _has_type(value: Any, dtype: int) -> bool:
    return bool(tf.as_dtype(value.dtype).as_datatype_enum == dtype)


def _make_constant(node: Any, value: Any) -> None:
    """Turn a node of a copy into a constant."""
    made = tf.make_tensor_proto(value)
    node.op = "Const"
    node.attr.clear()
    node.attr["dtype"].type = made.dtype
    node.attr["value"].tensor.CopyFrom(made)


def make_known(node: Any, dtype: int, dims: Iterable[int]) -> None:
    """Turn a node of a copy into a source of this type and shape."""
    node.op = KNOWN_SOURCE
    del node.input[:]
    node.attr.clear()
    node.attr["dtype"].type = dtype
    node.attr["memory_region_name"].s = b"none"
    node.attr["shape"].shape.SetInParent()  # a scalar has no dimension, and needs the attribute, too
    for size in dims:
        node.attr["shape"].shape.dim.add(size=size)


def infer(graph_def: Any, ends: Sequence[str]) -> dict[str, list[Output]]:
    """Return the types and shapes that TensorFlow infers for the outputs of a graph, by the node's name.

    Raises:
        ValueError: If the graph cannot be read; TensorFlow also raises others.
    """
    meta = meta_graph_pb2.MetaGraphDef(graph_def=graph_def)
    meta.collection_def["train_op"].node_list.value[:] = ends
    item = grappler_item.Item(meta, ignore_colocation=True, ignore_user_placement=False)
    return {
        name: [
            Output(one.dtype, None if one.shape.unknown_rank else tuple(dim.size for dim in one.shape.dim))
            for one in made
        ]
        for name, made in item.GetOpProperties().items()
    }


def _dims(shape: Any) -> Dims:
    return tuple(None if dim.size < 0 else dim.size for dim in shape.dim)


def _write(shape: Any, dims: Dims) -> bool:
    changed = False
    for dim, size in zip(shape.dim, dims, strict=True):
        changed |= size is not None and dim.size != size
        dim.size = -1 if size is None else size
    return changed
