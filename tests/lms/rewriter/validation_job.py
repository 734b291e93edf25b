"""Breaks an edited graph in each way that is checked for; prints as JSON what is said."""

import json
import os
from collections.abc import Callable, Collection, Sequence
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import tensorflow as tf  # noqa: E402
from tensorflow.core.framework import graph_pb2  # noqa: E402

from lms.device.kernels import OneDnnCpu, PlainCpu  # noqa: E402
from lms.reader.node_table import NodeTable  # noqa: E402
from lms.reader.shapes import infer  # noqa: E402
from lms.rewriter.validation import validate  # noqa: E402
from lms.rewriter.writer import RewriteError  # noqa: E402

CPU = "/job:localhost/replica:0/task:0/device:CPU:0"


def a_graph() -> Any:
    """A convolution with a bias that waits for more than it does, and their gradients."""
    v1 = tf.compat.v1
    with tf.Graph().as_default() as graph:
        images = v1.placeholder(tf.float32, (2, 8, 8, 3), "images")
        filters = v1.placeholder(tf.float32, (3, 3, 3, 4), "filters")
        slope = v1.placeholder(tf.float32, (2, 8, 8, 4), "slope")
        aside = tf.tanh(images, "aside")
        made = tf.nn.conv2d(images, filters, 1, "SAME", name="conv")
        shift = tf.zeros(4)
        with tf.control_dependencies([aside]):
            tf.nn.bias_add(made, shift, name="bias")
        v1.nn.conv2d_backprop_filter(images, filters.shape, slope, [1, 1, 1, 1], "SAME", name="filter_slope")
        tf.raw_ops.BiasAddGrad(out_backprop=slope, name="bias_slope")
        entered = tf.raw_ops.Enter(data=aside, frame_name="loop", name="entered")
        tf.raw_ops.Exit(data=tf.tanh(entered, "inner"), name="left")
    graph_def = graph.as_graph_def()
    for node in graph_def.node:
        node.device = CPU
    return graph_def


GRAPH = a_graph()
TABLE = NodeTable.of(GRAPH)
KNOWN = infer(GRAPH, ["bias", "filter_slope", "bias_slope", "aside", "left"])
OUTPUTS = [KNOWN.get(name, []) for name in TABLE.names]
FLOAT, INT = tf.float32.as_datatype_enum, tf.int32.as_datatype_enum


def said(edit: Callable[[Any, dict[str, Any]], Collection[str] | None], kernels: Any = None) -> str:
    """What is said of an edited copy; empty where nothing is wrong with it."""
    copy = graph_pb2.GraphDef.FromString(GRAPH.SerializeToString())
    added = edit(copy, {node.name: node for node in copy.node}) or ()
    try:
        validate(copy, TABLE, OUTPUTS, added, kernels or OneDnnCpu())
    except RewriteError as error:
        return str(error)
    return ""


def waits(*pairs: tuple[str, str]) -> Callable[[Any, dict[str, Any]], None]:
    """An edit that lets nodes wait for others."""

    def edit(_: Any, nodes: dict[str, Any]) -> None:
        for node, other in pairs:
            nodes[node].input.append(f"^{other}")

    return edit


def reads(node: str, slot: int, text: str) -> Callable[[Any, dict[str, Any]], None]:
    """An edit of what a node reads."""
    return lambda _, nodes: nodes[node].input.__setitem__(slot, text)


def adds(
    name: str,
    op: str = "Identity",
    device: str = CPU,
    reads: Sequence[str] = ("images",),
    dtype: int | None = FLOAT,
    read_at: int = 0,
    asked: str = "T",
) -> Callable[[Any, dict[str, Any]], Collection[str]]:
    """An edit that adds a copy of ``images``, which the convolution reads."""

    def edit(copy: Any, nodes: dict[str, Any]) -> Collection[str]:
        node = copy.node.add(name=name, op=op, device=device, input=reads)
        if dtype is not None:
            node.attr["T"].type = dtype
            assert not node.attr[asked].i  # asking adds it
        nodes["conv"].input[0] = f"{name}:{read_at}" if read_at else name
        return [name]

    return edit


def turned(_: Any, nodes: dict[str, Any]) -> Collection[str]:
    """An edit that gives what was read as an added node another type."""
    nodes["filter_slope"].attr["T"].type = INT
    return ["filter_slope"]


def main() -> None:
    """Print what is said."""
    found = {
        "as it was": said(waits()),
        "added": said(adds("copy", "Identity")),
        "one name": said(adds("conv", "Identity")),
        "no device": said(adds("copy", "Identity", "")),
        "part of a device": said(adds("copy", "Identity", "/device:CPU:0")),
        "unknown op": said(adds("copy", "NoSuchOp")),
        "two inputs": said(adds("copy", reads=("images", "images"))),
        "no type": said(adds("copy", dtype=None)),
        "no value": said(adds("copy", asked="num_outs")),
        "reads another type": said(adds("copy", dtype=INT)),
        "no such output": said(adds("copy", read_at=5)),
        "lost input": said(lambda _, nodes: nodes["aside"].ClearField("input")),
        "no node": said(reads("conv", 0, "nobody")),
        "no output": said(reads("conv", 0, "images:1")),
        "other type": said(reads("filter_slope", 1, "images")),
        "behind": said(lambda _, nodes: nodes["bias"].input.append("conv")),
        "renamed": said(lambda _, nodes: setattr(nodes["slope"], "name", "slant")),
        "makes other types": said(turned),
        "circle": said(waits(("images", "conv"))),
        "another frame": said(waits(("bias", "inner"))),
        "parted": said(waits(("bias_slope", "aside"))),
        "both wait": said(waits(("bias_slope", "aside"), ("filter_slope", "aside"))),
        "parted, without oneDNN": said(waits(("bias_slope", "aside")), PlainCpu()),
        "fatal": said(waits(("conv", "aside"))),
        "fatal, without oneDNN": said(waits(("conv", "aside")), PlainCpu()),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
