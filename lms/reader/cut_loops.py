"""Cut the loops of a graph open, so that TensorFlow infers the shapes within and behind them.

Of a value that turns in a loop TensorFlow infers what fits all turns: it gives sizes up where it does not
know those of the turn before, such as behind a list. Cut open, the loop is one turn with what it begins with,
what the backward pass takes from a list is what the forward pass has put into it, and a tensor that becomes a
list, or comes from one, has the shape of its parts. That holds for all
turns if each value leaves a turn with the shape that it came with, which is looked at behind it, and if no
shape hangs on what a value is, such as a counter's: so the values with which a turn begins are hidden.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from lms.ir.op_traits import MERGES
from lms.optimizer.grappler_item import Output
from lms.reader.loop_lists import EMPTY, GET, STACK, find_lists, list_length, tensor_of_list
from lms.reader.node_table import ENTERS, EXITS, TURNS, NodeTable
from lms.reader.op_facts import item_bytes, size_of

BOOL, INT32 = tf.bool.as_datatype_enum, tf.int32.as_datatype_enum
TURNED = ENTERS | EXITS | TURNS | {"LoopCond"}


def cut_loops(graph_def: Any) -> Mapping[str, str]:
    """Cut all loops of a graph open; it serves to infer shapes alone then.

    Returns:
        The names of the nodes with which a turn begins, each with the node that hands it the next turn's.
    """
    table = NodeTable.of(graph_def)
    lists = [*find_lists(table)]
    taken = {f"{table.names[pop]}:1": table.text(one.element) for one in lists for pop in one.pops}
    stacked = {end: one for one in lists for end in one.exits}
    turns: dict[str, str] = {}
    for number, node in enumerate(table.nodes):
        op_type, texts = table.types[number], [taken.get(text, text) for text in node.input]
        if op_type in MERGES:
            nexts = {source.node for source in table.inputs[number] if table.types[source.node] in TURNS}
            if nexts:
                others = [source for source in table.inputs[number] if source.node not in nexts]
                texts = [*(table.text(one) for one in others[:1]), *(t for t in texts if t[0] == "^")]
                turns[node.name] = table.names[nexts.pop()]
                _hand_on(node, node.attr["T"].type)
                _hide_value(node)
        elif op_type == GET and (read := tensor_of_list(table, table.inputs[number][0])) is not None:
            dtype = node.attr["element_dtype"].type
            texts = [table.text(read), *texts[1:2], *(text for text in texts if text[0] == "^")]
            _make(node, "Gather", {"Tparams": dtype, "Tindices": INT32})
        elif op_type == STACK and (one := stacked.get(table.inputs[number][0].node)) is not None:
            length = list_length(table, (), one) if table.types[one.begins] in EMPTY else None
            if length:
                dtype = node.attr["element_dtype"].type
                controls = [text for text in texts if text[0] == "^"]
                texts = [*([table.text(one.element)] * length), *controls]
                _make(node, "Pack", {"T": dtype})
                node.attr["N"].i = length
        elif op_type in TURNED:
            _hand_on(node, BOOL if op_type == "LoopCond" else node.attr["T"].type)
        node.input[:] = texts
    return turns


def turns_keep_shapes(turns: Mapping[str, str], known: Mapping[str, Sequence[Output]]) -> bool:
    """Tell whether each value with a known shape leaves a turn with the shape that it came with.

    Args:
        turns: What :func:`cut_loops` has returned.
        known: Type and shape of each node's outputs in the graph that was cut open.
    """
    for begins, ends in turns.items():
        came, left = known.get(begins), known.get(ends)
        if not came or not item_bytes(came[0].dtype) or size_of(came[0]) is None:
            continue
        if not left or left[0].dims != came[0].dims:
            return False
    return True


def _hand_on(node: Any, dtype: int) -> None:
    """Turn a node into one that hands on its input."""
    _make(node, "Identity", {"T": dtype})


def _make(node: Any, op_type: str, types: Mapping[str, int]) -> None:
    """Turn a node into one of another op, with these types as attributes."""
    node.op = op_type
    node.attr.clear()
    for name, dtype in types.items():
        node.attr[name].type = dtype


def _hide_value(node: Any) -> None:
    """Turn a node that hands on a plain tensor into one that TensorFlow does not compute in advance."""
    if item_bytes(node.attr["T"].type):
        node.op = "Print"
        node.attr["U"].list.SetInParent()
