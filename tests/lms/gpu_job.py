"""Traces steps as for a GPU and has Grappler optimize them beside a virtual one; prints what became of them.

No GPU is needed: a step is only traced and optimized, and never run.
"""

import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import tensorflow as tf  # noqa: E402
from tensorflow.core.protobuf import config_pb2, device_properties_pb2  # noqa: E402
from tensorflow.python.eager import context  # noqa: E402
from tensorflow.python.eager.polymorphic_function import transform  # noqa: E402
from tensorflow.python.grappler import cluster, tf_optimizer  # noqa: E402

import lms  # noqa: E402
from lms import hook  # noqa: E402
from lms.device import Device  # noqa: E402
from lms.engine import Engine  # noqa: E402
from lms.transports.device import TO_DEVICE, TO_HOST  # noqa: E402

HOST = "/job:localhost/replica:0/task:0/device:CPU:0"
GPU = "/job:localhost/replica:0/task:0/device:GPU:0"
LAYERS, CHANNELS = 5, 8


def normalised(x: Any, fused: bool) -> Any:
    """Batch normalisation, in one op or in many."""
    if fused:
        ones, zeros = tf.ones((CHANNELS,)), tf.zeros((CHANNELS,))
        return tf.raw_ops.FusedBatchNormV3(x=x, scale=ones, offset=zeros, mean=[], variance=[]).y
    mean, variance = tf.nn.moments(x, (0, 1, 2))
    return (x - mean) * tf.math.rsqrt(variance + 1e-3)


def train_step(dtype: Any, fused: bool) -> Any:
    """A step of a chain of convolutions with normalisations."""
    shape = (3, 3, CHANNELS, CHANNELS)
    kernels = [tf.Variable(tf.random.stateless_normal(shape, (1, seed))) for seed in range(LAYERS)]

    @tf.function
    def train(images: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            x = tf.cast(images, dtype)
            for kernel in kernels:
                x = tf.nn.conv2d(x, tf.cast(kernel, dtype), 1, "SAME")
                x = tf.nn.relu(normalised(x, fused))
            loss = tf.reduce_sum(tf.cast(x, tf.float32))
        for kernel, gradient in zip(kernels, tape.gradient(loss, kernels), strict=True):
            kernel.assign_sub(1e-3 * gradient)
        return loss

    return train


def traced(step: Any) -> Any:
    """The graph of the step for some images."""
    return step.get_concrete_function(tf.TensorSpec((16, 32, 32, CHANNELS))).graph


def placed(graph: Any) -> None:
    """The transform that puts a traced graph on the GPU, before LMS sees it."""
    for op in graph.get_operations():
        op._set_device("/device:GPU:0")


def pretend_gpu(capability: tuple[int, int], **fields: Any) -> Engine:
    """LMS as with a GPU of a compute capability."""
    transform.FUNC_GRAPH_TRANSFORMS.append(placed)
    lms.enable(policy="all", min_tensor_bytes=1 << 14, **fields)
    engine = hook.engine()
    engine._device = Device("GPU:0", None, capability)
    return engine


def optimized(graph: Any, capability: tuple[int, int]) -> list[Any]:
    """The nodes of a traced graph behind Grappler, with the options that hold in this process now."""
    meta = tf.compat.v1.MetaGraphDef()
    meta.graph_def.CopyFrom(graph.as_graph_def())
    for node in meta.graph_def.node:
        node.device = HOST if "CPU" in node.device else GPU
    kept = [tensor.name for tensor in graph.outputs] + [op.name for op in graph.control_outputs]
    meta.collection_def["train_op"].node_list.value.extend(kept)
    passed_on = context.context().function_call_options.config_proto_serialized
    config = config_pb2.ConfigProto.FromString(passed_on)  # as with every call of a function
    config.graph_options.rewrite_options.min_graph_nodes = -1
    devices = [_device(HOST, "CPU"), _device(GPU, "GPU", architecture="{}.{}".format(*capability))]
    return list(tf_optimizer.OptimizeGraph(config, meta, cluster=cluster.Cluster(devices=devices)).node)


def _device(name: str, kind: str, **environment: str) -> Any:
    made = device_properties_pb2.NamedDevice(name=name)
    made.properties.type, made.properties.memory_size = kind, 1 << 34
    made.properties.num_cores, made.properties.frequency = 8, 1000
    made.properties.environment.update(environment)
    return made


def looked_at(dtype: str, fused: bool, capability: tuple[int, int], asked: bool | None) -> dict[str, Any]:
    """What becomes of a step without LMS and with it."""
    if asked is not None:
        tf.config.optimizer.set_experimental_options({"layout_optimizer": asked})
    plain = Counter(node.op for node in optimized(traced(train_step(tf.as_dtype(dtype), fused)), capability))
    engine = pretend_gpu(capability)
    nodes = optimized(traced(train_step(tf.as_dtype(dtype), fused)), capability)
    edited = Counter(node.op for node in nodes)
    copies = [node for node in nodes if node.op in (TO_HOST, TO_DEVICE)]
    stats = engine.collector.graphs[-1]
    found = {
        "tensors": stats.tensors,
        "outs": edited[TO_HOST],
        "ins": edited[TO_DEVICE],
        "on_gpu": all(node.device == GPU for node in copies),
        "plain_turned": plain["Transpose"],
        "turned": edited["Transpose"],
        "reserve": stats.base_bytes,
        "peak": stats.planned_peak_bytes,
    }
    lms.disable()
    after = Counter(node.op for node in optimized(traced(train_step(tf.as_dtype(dtype), fused)), capability))
    return {**found, "after_turned": after["Transpose"]}


def stored() -> dict[str, Any]:
    """Where the swaps are that go to a folder."""
    with tempfile.TemporaryDirectory() as folder:
        engine = pretend_gpu((9, 0), store_dir=folder)
        nodes = optimized(traced(train_step(tf.float32, fused=False)), (9, 0))
    outs, ins = ([node for node in nodes if node.op == op] for op in ("LmsSwapOut", "LmsSwapIn"))
    return {
        "transport": engine.transport.name,
        "tensors": engine.collector.graphs[-1].tensors,
        "outs": len(outs),
        "ins": len(ins),
        "on_host": all(node.device == HOST for node in outs + ins),
    }


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "hopper": lambda: looked_at("float32", False, (9, 0), None),
    "volta": lambda: looked_at("float32", False, (7, 0), None),
    "fused": lambda: looked_at("float32", True, (9, 0), None),
    "half": lambda: looked_at("float16", True, (9, 0), None),
    "asked": lambda: looked_at("float32", False, (9, 0), True),
    "stored": stored,
    "refused": lambda: looked_at("float32", True, (9, 0), False),
}

print(json.dumps(CASES[sys.argv[1]]()))
