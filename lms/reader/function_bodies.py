"""Compute the memory of a function that a step calls and that TensorFlow has not inlined."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context
from tensorflow.python.framework import function_def_to_graph

from lms.ir.liveness import Buffers, timeline
from lms.optimizer.grappler_item import Output
from lms.reader.node_table import NodeTable
from lms.reader.op_facts import facts_of, item_bytes
from lms.reader.shapes import infer, make_known
from lms.reader.step_reader import read_step
from lms.reader.survey import Place

MUST_COMPILE = "_XlaMustCompile"
"""Marks a call of a function that XLA compiles: its ops are none of TensorFlow's executor."""


def body_peak(place: Place, node: Any, name: str, arguments: Sequence[Output]) -> int:
    """Return the bytes that ``name`` needs while ``node`` calls it; 0 where its body is not known."""
    try:
        definition = context.context().get_function_def(name)
        shapes = [_as_shape(argument) for argument in arguments]
        graph_def, _ = function_def_to_graph.function_def_to_graph_def(definition, shapes)
        table = NodeTable.of(graph_def)
        outputs = _infer(graph_def, table, arguments)
    except (tf.errors.OpError, ValueError, RuntimeError):
        return 0
    if MUST_COMPILE in node.attr and node.attr[MUST_COMPILE].b:
        return place.kernels.compiled_bytes(facts_of(table, outputs, one) for one in range(len(table.nodes)))
    everywhere = Place(lambda device: True, place.kernels, place.device_type)
    body = read_step(table, outputs, everywhere)
    return timeline(Buffers.of(body.graph), range(len(body.graph.ops))).peak_bytes


def unread_arguments(name: str) -> frozenset[int]:
    """Return the numbers of a function's arguments on which nothing depends that it returns or does.

    TensorFlow removes them from the graph that it optimizes.
    """
    try:
        definition = context.context().get_function_def(name)
    except tf.errors.OpError:
        return frozenset()
    nodes = {node.name: node for node in definition.node_def}
    wanted = [*definition.ret.values(), *definition.control_ret.values()]
    seen: set[str] = set()
    while wanted:
        found = wanted.pop().removeprefix("^").partition(":")[0]
        if found not in seen:
            seen.add(found)
            wanted += nodes[found].input if found in nodes else ()
    arguments = enumerate(definition.signature.input_arg)
    return frozenset(number for number, argument in arguments if argument.name not in seen)


def _as_shape(output: Output) -> Any:
    if output.dims is None:
        return tf.TensorShape(None)
    return tf.TensorShape([None if dim < 0 else dim for dim in output.dims])


def _infer(graph_def: Any, table: NodeTable, arguments: Sequence[Output]) -> list[list[Output]]:
    given = iter(arguments)
    for node in graph_def.node:
        if node.op == "Placeholder":
            output = next(given, None)
            if output is not None and output.dims is not None and min(output.dims, default=0) >= 0:
                if item_bytes(output.dtype):
                    make_known(node, output.dtype, output.dims)
    ends = [name for name, op_type in zip(table.names, table.types, strict=True) if op_type != "Placeholder"]
    known = infer(graph_def, ends)
    return [known.get(name, []) for name in table.names]
