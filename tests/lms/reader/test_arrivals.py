"""Tensors that one device makes and another one reads: TensorFlow makes a copy there, which takes memory."""

import pytest

pytest.importorskip("tensorflow")
import tensorflow as tf
from tensorflow.core.framework import graph_pb2

from lms.device.device import Device
from lms.device.kernels import PlainCpu
from lms.ir.graph import Graph
from lms.ir.liveness import Buffers
from lms.optimizer.grappler_item import Output
from lms.reader.node_table import NodeTable
from lms.reader.step_reader import ARRIVES, read_step
from lms.reader.survey import Place, most_bytes

pytestmark = pytest.mark.tensorflow

HOST, GPU = "/job:a/replica:0/task:0/device:CPU:0", "/job:a/replica:0/task:0/device:GPU:0"
NODES = {
    "images": ("IteratorGetNext", HOST, ()),
    "made": ("Sqrt", HOST, ("images",)),
    "shape": ("Shape", HOST, ("images",)),
    "constant": ("Const", HOST, ()),
    "first": ("AddV2", GPU, ("images", "made")),
    "second": ("AddV2", GPU, ("images", "constant")),
    "third": ("Reshape", GPU, ("first", "shape")),
}
FLOATS = Output(tf.float32.as_datatype_enum, (1024,))


def read(
    nodes: dict[str, tuple[str, str, tuple[str, ...]]], on: str = "GPU:0"
) -> tuple[Graph, NodeTable, Place]:
    graph_def = graph_pb2.GraphDef()
    for name, (op_type, device, inputs) in nodes.items():
        node = graph_def.node.add(name=name, op=op_type, input=inputs, device=device)
        node.attr["T"].type = tf.float32.as_datatype_enum
        node.attr["Tshape"].type = tf.int32.as_datatype_enum
    table, where = NodeTable.of(graph_def), Device(on, None)
    place = Place(where.holds, PlainCpu(), where.type, where.keeps_on_host, where.reads_on_host)
    return read_step(table, [[FLOATS] for _ in table.nodes], place).graph, table, place


@pytest.mark.parametrize(("device", "held"), [(GPU, True), (HOST, False)])
def test_the_operand_of_an_allreduce_is_held_until_its_result_is_used(device: str, held: bool) -> None:
    """On a GPU its kernel is launched long before it is done."""
    nodes = {
        "gradient": ("Sqrt", device, ()),
        "reduced": ("HorovodAllreduce", device, ("gradient",)),
        "scaled": ("Neg", device, ("reduced",)),
    }
    graph, *_ = read(nodes, device.rpartition("device:")[2])
    users = Buffers.of(graph).users[graph.ops[0].outputs[0]]
    assert [graph.ops[op].name for op in users] == ["reduced", "scaled"][: 1 + held]


def test_the_copy_of_a_tensor_of_another_device_takes_memory_until_its_last_reader_there() -> None:
    graph, table, place = read(NODES)
    outputs = [[FLOATS] for _ in table.nodes]
    assert [op.name for op in graph.ops if op.elsewhere] == ["images", "made", "shape", "constant"]
    buffers = Buffers.of(graph)
    made = {graph.ops[graph.tensors[root].op].name: root for root in buffers.owners}
    assert sorted(made) == ["first", "images", "made", "second"], "not what lies or is read on the host"
    assert graph.tensors[made["made"]].forbidden == ARRIVES and graph.tensors[made["images"]].forbidden
    readers = [graph.ops[op].name for op in buffers.users[made["images"]]]
    assert readers[-1] == "second"
    most = most_bytes(table, outputs, place)
    assert most is not None and most >= sum(buffers.nbytes)
