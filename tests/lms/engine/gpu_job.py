"""Has TensorFlow optimize steps beside a virtual GPU, with LMS behind it; prints what became of them.

No GPU is needed: a step is only traced and optimized, and never run.

    python gpu_job.py device|stored
"""

import json
import os
import sys
import tempfile
import warnings
from collections import Counter
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import tensorflow as tf  # noqa: E402
from tensorflow.core.protobuf import config_pb2, device_properties_pb2  # noqa: E402
from tensorflow.python.grappler import cluster, tf_optimizer  # noqa: E402

import lms  # noqa: E402
from lms.device.device import Device  # noqa: E402
from lms.engine.installation import engine  # noqa: E402
from lms.optimizer import plugin  # noqa: E402
from lms.reader.node_table import MARK_ATTR  # noqa: E402
from lms.transports.device import TO_DEVICE, TO_HOST  # noqa: E402

HOST = "/job:localhost/replica:0/task:0/device:CPU:0"
GPU = "/job:localhost/replica:0/task:0/device:GPU:0"
LAYERS, CHANNELS = 5, 8


def traced() -> Any:
    """The graph of a step of a chain of convolutions with normalisations."""
    shape = (3, 3, CHANNELS, CHANNELS)
    kernels = [tf.Variable(tf.random.stateless_normal(shape, (1, seed))) for seed in range(LAYERS)]
    ones, zeros = tf.ones((CHANNELS,)), tf.zeros((CHANNELS,))

    @tf.function
    def train(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            for kernel in kernels:
                x = tf.nn.conv2d(x, kernel, 1, "SAME")
                x = tf.raw_ops.FusedBatchNormV3(x=x, scale=ones, offset=zeros, mean=[], variance=[]).y
                x = tf.nn.relu(x)
            loss = tf.reduce_sum(x)
        for kernel, gradient in zip(kernels, tape.gradient(loss, kernels), strict=True):
            kernel.assign_sub(1e-3 * gradient)
        return loss

    return train.get_concrete_function(tf.TensorSpec((16, 32, 32, CHANNELS))).graph


def optimized(graph: Any, capability: tuple[int, int]) -> list[Any]:
    """The nodes of a traced graph behind TensorFlow's optimizer, on a GPU of a compute capability."""
    meta = tf.compat.v1.MetaGraphDef()
    meta.graph_def.CopyFrom(graph.as_graph_def())
    for node in meta.graph_def.node:
        node.device = GPU
    kept = [tensor.name for tensor in graph.outputs] + [op.name for op in graph.control_outputs]
    meta.collection_def["train_op"].node_list.value.extend(kept)
    config = config_pb2.ConfigProto()
    config.graph_options.rewrite_options.min_graph_nodes = -1
    config.graph_options.rewrite_options.memory_optimization = 1  # none, as with each planned call
    devices = [_device(HOST, "CPU"), _device(GPU, "GPU", architecture="{}.{}".format(*capability))]
    return list(tf_optimizer.OptimizeGraph(config, meta, cluster=cluster.Cluster(devices=devices)).node)


def _device(name: str, kind: str, **environment: str) -> Any:
    made = device_properties_pb2.NamedDevice(name=name)
    made.properties.type, made.properties.memory_size = kind, 1 << 34
    made.properties.num_cores, made.properties.frequency = 8, 1000
    made.properties.environment.update(environment)
    return made


def planned(out: str, back: str, **fields: Any) -> dict[str, Any]:
    """What becomes of a step without LMS and with it; its swaps are ops of the types ``out`` and ``back``."""
    graph = traced()
    plain = Counter(node.op for node in optimized(graph, (9, 0)))
    warnings.simplefilter("ignore")  # a function that nobody calls has open sizes
    lms.enable(policy="all", min_tensor_bytes=1 << 14, **fields)
    plugin.load(("GPU",), os.environ)
    engine().resources._devices = (Device("GPU:0", None, (9, 0)),)
    nodes = optimized(graph, (9, 0))
    (stats,) = lms.report().edited
    ours = Counter(node.op for node in nodes if MARK_ATTR in node.attr)
    others = Counter(node.op for node in nodes if MARK_ATTR not in node.attr)
    return {
        "transport": lms.report().transport,
        "tensors": stats.tensors,
        "swap_ins": stats.swap_ins,
        "outs": ours[out],
        "ins": ours[back],
        "devices": sorted({node.device for node in nodes if node.op in (out, back)}),
        "others": others == plain,
    }


def stored() -> dict[str, Any]:
    """The same with a folder to store in."""
    with tempfile.TemporaryDirectory() as folder:
        return planned("LmsSwapOut", "LmsSwapIn", store_dir=folder)


print(json.dumps(stored() if sys.argv[1] == "stored" else planned(TO_HOST, TO_DEVICE)))
