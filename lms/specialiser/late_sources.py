"""Make large tensors that need no data when they are first read, and not when the step begins.

What a branch makes of constants alone, as the random numbers of a dropout, waits for nothing any more once
the condition is gone. And the gradients of a ``tf.cond`` of compat.v1 are sums of what both branches give, so
the branch that was taken adds a tensor of zeros for the other one. TensorFlow makes them all before the
backward pass, and those of up to 10 MiB before the first step, for good: together they take as much as the
activations.

So each waits for the other inputs of the op that reads it first. Zeros get their dimensions from a ``Merge``,
which TensorFlow computes in each step, so that they are no constant.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from math import prod
from typing import Any

import tensorflow as tf

from lms.ir.op_traits import CONSTANTS, EXIT, MERGES
from lms.optimizer.grappler_item import Output
from lms.reader.conditions import find_conditions
from lms.reader.node_table import MARK_ATTR, ROOT, NodeTable, inverted
from lms.reader.shapes import SHAPES
from lms.specialiser.new_nodes import CONSTANT, FILL, INT32, constant, turn_into_fill

DRAWS = ("ParameterizedTruncatedNormal", "RandomStandardNormal", "RandomUniform", "TruncatedNormal")
"""Types of the ops that draw random numbers of the shape that they read first."""
VALUES = ("half_val", "float_val", "double_val")


def delay_sources(graph_def: Any, kept: Collection[str], min_bytes: int) -> Mapping[str, list[Output]]:
    """Have tensors that need no data made late.

    Args:
        graph_def: The graph; changed in place.
        kept: The names of the nodes that are fed, fetched or run.
        min_bytes: Smaller tensors may be made at any time.

    Returns:
        Type and shape of what the new nodes make, by their names.
    """
    table = NodeTable.of(graph_def, kept)
    apart = _apart_from_data(table)
    after, conditions = inverted(table.before), find_conditions(table, ROOT)
    place = {node: position for position, node in enumerate(table.order)}
    made: dict[str, list[Output]] = {}
    for node in sorted(apart):
        nbytes = 0 if table.names[node] in kept else _source_bytes(table, node)
        if nbytes is not None and nbytes < min_bytes:
            continue
        waits = _needed_beside(table, node, apart, after, place)
        if waits and all(
            table.frame[one] == ROOT and conditions.runs_with(one, node) for one in (node, *waits)
        ):
            names = [table.names[one] for one in sorted(waits)]
            filled = _filled(table, node)
            if filled is None:
                table.nodes[node].input.extend(f"^{name}" for name in names)
            else:
                made |= _write_fill(graph_def, table.nodes[node], filled, names)
    return made


def _apart_from_data(table: NodeTable) -> set[int]:
    """Return the nodes that are made of constants, shapes and random numbers alone."""
    found: set[int] = set()
    for node in table.order:
        op_type, read = table.types[node], table.inputs[node]
        is_source = op_type in CONSTANTS or op_type in DRAWS or op_type in SHAPES
        if is_source or (read and all(source.node in found for source in read)):
            found.add(node)
    return found


def _needed_beside(
    table: NodeTable,
    node: int,
    apart: Collection[int],
    after: Sequence[Sequence[int]],
    place: Mapping[int, int],
) -> set[int]:
    """Return what the first op with data needs that reads what was made of a source.

    None of that depends on the source, for this reader is the first one.
    """
    seen, pending, readers = {node}, [node], set[int]()
    while pending:
        for reader in after[pending.pop()]:
            if reader not in apart:
                readers.add(reader)
            elif reader not in seen:
                seen.add(reader)
                pending.append(reader)
    if not readers:
        return set()
    first = min(readers, key=place.__getitem__)
    if table.types[first] in MERGES:  # it runs where another input of it does not come
        return set()
    return {source.node for source in table.inputs[first] if source.node not in apart}


def _source_bytes(table: NodeTable, node: int) -> int | None:
    """Return how many bytes a source makes: 0 where it is none, ``None`` where they are not known."""
    if (filled := _filled(table, node)) is not None:
        return _bytes(filled.dtype, (dim.size for dim in filled.tensor_shape.dim))
    if table.types[node] not in (FILL, *DRAWS):
        return 0
    shape = table.nodes[table.inputs[node][0].node]
    if shape.op != CONSTANT:
        return None
    sizes = tf.make_ndarray(shape.attr["value"].tensor).tolist()
    return _bytes(table.nodes[node].attr["dtype"].type, sizes) if table.types[node] in DRAWS else 0


def _filled(table: NodeTable, node: int) -> Any | None:
    """Return the tensor of one value that a node always makes, with a value or none where that is zero."""
    attr = table.nodes[node].attr
    if table.types[node] == CONSTANT:
        held = attr["value"].tensor
        is_one = not held.tensor_content and sum(len(getattr(held, name)) for name in VALUES) <= 1
        return held if is_one and tf.as_dtype(held.dtype).is_floating else None
    read = [table.nodes[source.node] for source in table.inputs[node]]
    if table.types[node] != FILL or any(one.op != CONSTANT for one in read):
        return None
    dims, value = (one.attr["value"].tensor for one in read)
    if not tf.as_dtype(value.dtype).is_floating:
        return None
    found = tf.make_tensor_proto(tf.make_ndarray(value))
    found.tensor_shape.CopyFrom(tf.TensorShape(tf.make_ndarray(dims)).as_proto())
    return found


def _bytes(dtype: int, sizes: Iterable[int]) -> int:
    size: int = tf.as_dtype(dtype).size
    return prod(sizes) * size


def _write_fill(graph_def: Any, node: Any, filled: Any, waits: Collection[str]) -> dict[str, list[Output]]:
    """Turn a node into a ``Fill`` that waits; return the outputs of the nodes that it reads."""
    dims, value, now = (f"{node.name}/lms_{what}" for what in ("dims", "value", "now"))
    shape = [dim.size for dim in filled.tensor_shape.dim]
    one = type(filled)()
    one.CopyFrom(filled)
    one.tensor_shape.Clear()
    graph_def.node.append(constant(dims, tf.make_tensor_proto(shape, tf.int32), node.device))
    graph_def.node.append(constant(value, one, node.device))
    merge = graph_def.node.add(name=now, op="Merge", device=node.device, input=[dims])
    merge.attr["T"].type, merge.attr["N"].i = INT32, 1
    merge.attr[MARK_ATTR].s = EXIT.encode()
    before = [text[1:] for text in node.input if text[0] == "^"]
    turn_into_fill(node, now, value, filled.dtype, dict.fromkeys([*before, *waits]))
    vector = Output(INT32, (len(shape),))
    return {dims: [vector], value: [Output(filled.dtype, ())], now: [vector, Output(INT32, ())]}
