"""Write a step that exchanges nothing with other ranks.

A step that runs out of memory is undone and tried again, but not one that other ranks take part in: they
have received a part of it. So a plan for such a step runs a few times without them before, and is
undone each time. In place of what ranks make together stands a copy of what this one has made: as large, and
in memory of its own, as Horovod's results are (``HorovodAllreduceOp::ComputeAsync`` in ``mpi_ops.cc``).
"""

from typing import Any

import tensorflow as tf
from tensorflow.core.framework import graph_pb2

from lms.ir.op_traits import APART_TYPES, GATHERS, GROUPED
from lms.reader.op_facts import has_kernel

COPIES, HANDS_ON, JOINS = "DeepCopy", "Identity", "ConcatV2"
INT32 = tf.int32.as_datatype_enum


def without_peers(graph: bytes, ranks: int) -> bytes:
    """Return a graph in which copies stand for what ranks make together.

    Args:
        graph: A serialized GraphDef, whose collectives are of the types that
            :data:`~lms.ir.op_traits.APART_TYPES` names.
        ranks: The number of ranks: results of a gathering are so many times as large.
    """
    graph_def = graph_pb2.GraphDef.FromString(graph)
    renamed: dict[str, str] = {}
    """By an output of a group what stands for it."""
    for node in [*graph_def.node]:
        if node.op == GROUPED:
            _ungroup(graph_def, node, renamed)
        elif node.op == GATHERS:
            _join(graph_def, node, ranks)
        elif node.op in APART_TYPES:
            _copy(node)
    for node in graph_def.node if renamed else ():
        for slot, text in enumerate(node.input):
            node.input[slot] = renamed.get(text, text)
    written: bytes = graph_def.SerializeToString()
    return written


def _copy(node: Any) -> None:
    """Make a node one that copies its input, or hands it on where the device has no op that copies."""
    dtype = node.attr["T"].type
    device = tf.DeviceSpec.from_string(node.device).device_type or "CPU"
    node.attr.clear()
    node.op = COPIES if has_kernel(COPIES, device, dtype) else HANDS_ON
    node.attr["T"].type = dtype


def _ungroup(graph_def: Any, node: Any, renamed: dict[str, str]) -> None:
    """Add a copy of each tensor of a group; the node itself stays for those that wait for it."""
    many, dtype = node.attr["num_tensors"].i, node.attr["T"].type
    tensors, controls = node.input[:many], node.input[many:]
    for index, text in enumerate(tensors):
        name = f"{node.name}/apart_{index}"
        one = graph_def.node.add(name=name, device=node.device, input=[text, *controls])
        one.attr["T"].type = dtype
        _copy(one)
        renamed[f"{node.name}:{index}"] = name
        if not index:
            renamed[node.name] = name
    node.op = "NoOp"
    node.attr.clear()
    node.input[:] = [f"^{node.name}/apart_{index}" for index in range(many)]


def _join(graph_def: Any, node: Any, ranks: int) -> None:
    """Make a node one that joins as many copies of its input as there are ranks."""
    text, *controls = node.input
    dtype = node.attr["T"].type
    axis = graph_def.node.add(name=f"{node.name}/apart_axis", op="Const", device=node.device)
    axis.attr["dtype"].type = INT32
    axis.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(0, tf.int32))
    axis.input.append(f"^{text.partition(':')[0]}")  # so that it is in the same frame
    node.attr.clear()
    node.op = JOINS
    node.input[:] = [*[text] * ranks, axis.name, *controls]
    node.attr["N"].i, node.attr["T"].type, node.attr["Tidx"].type = ranks, dtype, INT32
