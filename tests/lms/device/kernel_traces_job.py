"""Runs one op of many types; prints what each asked the allocator for, and what its kernels foretell."""

import inspect
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402
from tensorflow.python.util import _pywrap_util_port  # noqa: E402

from lms.device.kernels import OneDnnCpu, OpFacts, PlainCpu, Reader  # noqa: E402
from lms.ir.op_traits import IN_PLACE_TYPES, in_place_output  # noqa: E402
from lms.native.processor_cache import read_l3_bytes  # noqa: E402

raw = tf.raw_ops
IMAGES, ROWS = (4, 32, 32, 16), (256, 256)
EQUATIONS = (
    ("aecd,abcd->acbe", (4, 64, 8, 32), (4, 64, 8, 32)),
    ("acbe,aecd->abcd", (4, 8, 64, 64), (4, 64, 8, 32)),
    ("abc,cde->abde", (4, 64, 64), (64, 8, 32)),
    ("abcd,cde->abe", (4, 64, 8, 32), (8, 32, 64)),
    ("acbe,abcd->aecd", (4, 8, 64, 64), (4, 64, 8, 32)),
    ("abe,cde->abcd", (4, 64, 256), (8, 32, 256)),
    ("...ij,...jk->...ik", (4, 8, 64, 32), (4, 8, 32, 64)),
)
REDUCED = (
    ((4, 16, 16, 8, 32), (1, 2, 4), True),
    ((4, 16, 16, 128), (1, 2), False),
    ((4, 16, 16, 128), (0, 1, 2), False),
    ((8, 16, 24, 32), (1, 3), False),
    ((4, 1, 32, 512), (3,), True),
)


def read(shape: tuple[int, ...]) -> Any:
    """A tensor that nobody else holds."""
    made = np.random.default_rng(7).random(shape, dtype=np.float32) / 2 + 0.25
    return raw.DeepCopy(x=tf.constant(made))


def pooled(window: int) -> Callable[[], Any]:
    """A pooling and its gradient."""
    sizes = {"ksize": [1, window, window, 1], "strides": [1, 2, 2, 1], "padding": "SAME"}

    def make() -> Any:
        images = read(IMAGES)
        made = raw.MaxPool(input=images, **sizes)
        return [raw.MaxPoolGrad(orig_input=images, orig_output=made, grad=raw.DeepCopy(x=made), **sizes)]

    return make


def normalised(channels: int) -> Callable[[], Any]:
    """A normalisation that oneDNN merges with its activation."""

    def make() -> Any:
        ones = tf.ones(channels)
        made = raw.FusedBatchNormV3(
            x=read((4, 16, 16, channels)), scale=ones, offset=ones, mean=[], variance=[], is_training=True
        )
        return [tf.nn.relu(made.y), raw.DeepCopy(x=made.reserve_space_3)]

    return make


def layer(summed: bool) -> Callable[[], Any]:
    """A layer that is merged into one op, with a shortcut or without."""

    def make() -> Any:
        made = tf.nn.bias_add(tf.nn.conv2d(read(IMAGES), read((3, 3, 16, 16)), 1, "SAME"), read((16,)))
        return [tf.nn.relu(made + read(IMAGES) if summed else made)]

    return make


def volumes(count: int, side: int, read_channels: int, made: int) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Make the gradients of a 3D convolution."""
    images, window = (count, *[side] * 3, read_channels), (3, 3, 3, read_channels, made)
    gradient, how = (*images[:-1], made), {"strides": [1] * 5, "padding": "SAME"}
    name = f"of {count} volumes of {side}"
    yield (
        f"images' gradient {name}",
        lambda: [
            raw.Conv3DBackpropInputV2(
                input_sizes=images, filter=read(window), out_backprop=read(gradient), **how
            )
        ],
    )
    yield (
        f"filter's gradient {name}",
        lambda: [
            raw.Conv3DBackpropFilterV2(
                input=read(images), filter_sizes=window, out_backprop=read(gradient), **how
            )
        ],
    )


def cases() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Cases by name; each makes the tensors that are fetched."""
    for equation, *shapes in EQUATIONS:
        yield equation, lambda e=equation, s=shapes: [raw.Einsum(inputs=list(map(read, s)), equation=e)]
    for shape, axis, keep in REDUCED:
        yield (
            f"sum of {shape} over {axis}",
            lambda s=shape, a=axis, k=keep: [raw.Sum(input=read(s), axis=a, keep_dims=k)],
        )
    for window in (2, 16):
        yield f"pool of {window}", pooled(window)
    for channels in (8, 20, 64):
        yield f"normalised {channels}", normalised(channels)
    for summed in (False, True):
        yield f"layer {summed}", layer(summed)
    apart = {"ksize": [1, 2, 2, 1], "strides": [1, 2, 2, 1], "padding": "SAME"}
    half = (4, 16, 16, 16)
    convolved = {"strides": [1, 1, 1, 1], "padding": "SAME"}
    yield (
        "pool's gradient alone",
        lambda: [raw.MaxPoolGrad(orig_input=read(IMAGES), orig_output=read(half), grad=read(half), **apart)],
    )
    yield (
        "images' gradient",
        lambda: [
            raw.Conv2DBackpropInput(
                input_sizes=IMAGES,
                filter=read((3, 3, 16, 32)),
                out_backprop=read((*IMAGES[:3], 32)),
                **convolved,
            )
        ],
    )
    yield (
        "filter's gradient",
        lambda: [
            raw.Conv2DBackpropFilter(
                input=read(IMAGES),
                filter_sizes=(3, 3, 16, 32),
                out_backprop=read((*IMAGES[:3], 32)),
                **convolved,
            )
        ],
    )
    yield from volumes(1, 16, 8, 16)
    yield from volumes(2, 16, 8, 8)
    yield from volumes(512, 8, 8, 8)
    # Whether oneDNN takes bfloat16 depends on the processor: it needs AVX-512 for that.
    for dtype in () if _pywrap_util_port.IsMklEnabled() else (tf.float16, tf.bfloat16):
        yield (
            f"filter's gradient of {dtype.name} volumes",
            lambda t=dtype: [
                raw.Conv3DBackpropFilterV2(
                    input=tf.cast(read((2048, 8, 8, 8, 8)), t),
                    filter_sizes=(3, 3, 3, 8, 2),
                    out_backprop=tf.cast(read((2048, 8, 8, 8, 2)), t),
                    strides=[1] * 5,
                    padding="SAME",
                )
            ],
        )
    yield (
        "depthwise filter's gradient",
        lambda: [
            raw.DepthwiseConv2dNativeBackpropFilter(
                input=read((32, 16, 16, 100)),
                filter_sizes=(7, 7, 100, 1),
                out_backprop=read((32, 16, 16, 100)),
                **convolved,
            )
        ],
    )
    yield (
        "rows",
        lambda: [
            raw.StridedSlice(input=read((4, *ROWS)), begin=[2], end=[3], strides=[1], shrink_axis_mask=1)
        ],
    )
    yield "unpacked", lambda: list(raw.Unpack(value=read((3, *ROWS)), num=3, axis=0))
    yield "unpacked across", lambda: list(raw.Unpack(value=read((256, 3, 256)), num=3, axis=1))
    yield "split", lambda: list(raw.Split(axis=0, value=read(ROWS), num_split=2))
    yield "split across", lambda: list(raw.Split(axis=1, value=read(ROWS), num_split=2))
    yield "slice", lambda: [raw.Slice(input=read(ROWS), begin=[8, 0], size=[64, 256])]
    column = (256, 1, 256)
    for op_type in ("Max", "Mean", "Min", "Prod", "Sum"):
        definition = getattr(raw, op_type)
        yield (
            f"{op_type} of no dimension",
            lambda d=definition: [d(input=read(ROWS), axis=tf.zeros(0, tf.int32))],
        )
        yield f"{op_type} of a column", lambda d=definition: [d(input=read(column), axis=[1])]
    yield "one tile", lambda: [raw.Tile(input=read(ROWS), multiples=[1, 1])]
    yield "two tiles", lambda: [raw.Tile(input=read(ROWS), multiples=[2, 1])]
    yield "broadcast to itself", lambda: [raw.BroadcastTo(input=read(ROWS), shape=ROWS)]
    yield "padded with nothing", lambda: [raw.Pad(input=read(ROWS), paddings=[[0, 0], [0, 0]])]
    yield "padded with a row", lambda: [raw.Pad(input=read(ROWS), paddings=[[0, 1], [0, 0]])]
    yield (
        "mirrored with nothing",
        lambda: [raw.MirrorPad(input=read(ROWS), paddings=[[0, 0], [0, 0]], mode="REFLECT")],
    )
    yield "whole slice", lambda: [raw.Slice(input=read(ROWS), begin=[0, 0], size=ROWS)]
    yield "turned row", lambda: [raw.Transpose(x=read((65536, 1)), perm=[1, 0])]
    yield "turned rows", lambda: [raw.Transpose(x=read(ROWS), perm=[1, 0])]
    yield (
        "loss",
        lambda: list(
            raw.SparseSoftmaxCrossEntropyWithLogits(features=read(ROWS), labels=tf.zeros(256, tf.int32))
        ),
    )
    yield "choice", lambda: [raw.SelectV2(condition=tf.zeros(ROWS, bool), t=read(ROWS), e=read(ROWS))]
    for op_type in sorted(IN_PLACE_TYPES & set(dir(raw)) - {"AddN", "BiasAdd", "BiasAddV1"}):
        definition = getattr(raw, op_type)
        parameters = inspect.signature(definition).parameters.values()
        names = [one.name for one in parameters if one.default is inspect.Parameter.empty]
        yield op_type, lambda d=definition, n=names: [d(**{name: read(ROWS) for name in n})]


def facts_of(node: Any, op: Any, types: dict[str, str], rows: dict[str, Any]) -> OpFacts:
    """The facts of a node that ran."""
    sources = [text.partition(":")[::2] for text in node.input if text[0] != "^"]
    shapes = [rows.get(name, {}).get(int(index or 0)) for name, index in sources]
    return OpFacts(
        op,
        tuple(None if shape is None else shape[0] for shape in shapes),
        tuple(rows[node.name][index][0] for index in sorted(rows[node.name])),
        tuple(None if shape is None else shape[1] for shape in shapes),
        tuple(rows[node.name][index][1] for index in sorted(rows[node.name])),
        {name: plain(value) for name, value in node.attr.items()},
        tuple(
            Reader(types[other], slot)
            for other, inputs in rows["readers"].items()
            for slot, text in enumerate(inputs)
            if text == node.name
        ),
        tuple(types[name] for name, _ in sources),
    )


def plain(value: Any) -> Any:
    """An attribute as a plain value."""
    kind = value.WhichOneof("value")
    if kind == "list":
        return [*value.list.i, *(one.decode() for one in value.list.s)]
    found = getattr(value, kind)
    return (
        found.decode()
        if isinstance(found, bytes)
        else found
        if isinstance(found, int | float)
        else str(found)
    )


def native(op_type: str) -> str:
    """The type that an op had in front of oneDNN's graph pass."""
    for prefix in ("_MklNative", "_Mkl"):
        name = op_type.removeprefix(prefix)
        if name != op_type and name not in ("LayerNorm", "Swish"):
            merged = name.startswith(("FusedConv", "FusedMatMul", "FusedBatchNormEx"))
            return f"_{name}" if merged else name
    return op_type


def run(make: Callable[[], Any]) -> Iterator[dict[str, Any]]:
    """What the ops of a case asked for, and what their facts say."""
    graph = tf.Graph()
    with graph.as_default():
        fetched = [tf.identity(tensor).op for tensor in make()]
    config = tf.compat.v1.ConfigProto(intra_op_parallelism_threads=1)
    config.graph_options.rewrite_options.min_graph_nodes = -1
    config.graph_options.rewrite_options.memory_optimization = 1
    options = tf.compat.v1.RunOptions(trace_level=3, output_partition_graphs=True)
    seen = tf.compat.v1.RunMetadata()
    with tf.compat.v1.Session(graph=graph, config=config) as session:
        session.run(fetched, options=options, run_metadata=seen)
    nodes = {node.name: node for part in seen.partition_graphs for node in part.node}
    types = {name: native(node.op) for name, node in nodes.items()}
    rows: dict[str, Any] = {}
    asked = {}
    for device in seen.step_stats.dev_stats:
        for ran in device.node_stats:
            rows[ran.node_name] = {
                one.slot: (
                    one.tensor_description.allocation_description.requested_bytes,
                    tuple(dim.size for dim in one.tensor_description.shape.dim),
                    one.tensor_description.allocation_description.ptr,
                )
                for one in ran.output
            }
            asked[ran.node_name] = (
                sum(used.peak_bytes for used in ran.memory),
                ran.memory_stats.temp_memory_size,
            )
    rows["readers"] = {name: list(node.input) for name, node in nodes.items()}
    kernels = (OneDnnCpu if _pywrap_util_port.IsMklEnabled() else PlainCpu)(1, read_l3_bytes())
    for name, node in nodes.items():
        if (
            node.op in ("DeepCopy", "Const", "Identity", "NoOp", "Fill")
            or name not in asked
            or not rows.get(name)
        ):
            continue
        facts = facts_of(node, types[name], types, rows)
        yield measured(facts, node, rows, asked[name], kernels)


def measured(facts: OpFacts, node: Any, rows: Any, asked: tuple[int, int], kernels: Any) -> dict[str, Any]:
    """One op: what it took and what was foretold."""
    held = {}
    for slot, text in enumerate(node.input):
        name, _, index = text.partition(":")
        if name in rows and int(index or 0) in rows[name]:
            held[rows[name][int(index or 0)][2]] = slot
    outputs = rows[node.name]
    lies_in = [held.get(outputs[index][2]) if outputs[index][0] else None for index in sorted(outputs)]
    extra = {
        one.output if one.output is not None else len(outputs) - 1: one.nbytes
        for one in kernels.extra_outputs(facts)
    }
    slots = kernels.in_place_slots(facts)
    place = in_place_output(facts.type)
    wanted = facts.output_bytes[place] if place < len(facts.output_bytes) else 0
    fits = [slot for slot in slots if slot < len(facts.input_bytes) and facts.input_bytes[slot] == wanted]
    aliases = list(kernels.alias_slots(facts))
    foretold = [aliases[index] if index < len(aliases) else None for index in range(len(outputs))]
    if fits and wanted and foretold[place] is None:
        foretold[place] = fits[0]
    return {
        "type": facts.type,
        "peak": asked[0],
        "foretold_peak": kernels.workspace_bytes(facts)
        + sum(nbytes for index, nbytes in enumerate(facts.output_bytes) if foretold[index] is None),
        "lies_in": lies_in,
        "foretold": foretold,
        "extra": {str(index): [facts.output_bytes[index], nbytes] for index, nbytes in extra.items()},
    }


if __name__ == "__main__":
    chosen = sys.argv[1:]
    found = {name: list(run(make)) for name, make in cases() if not chosen or name in chosen}
    print(json.dumps([tf.__version__, found]))
