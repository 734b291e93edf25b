"""Steps that exchange nothing with other ranks: what stands for collectives, and which steps may run so."""

from typing import Any

import pytest

pytest.importorskip("tensorflow")
import tensorflow as tf
from tensorflow.core.framework import graph_pb2

from lms.calls.apart import without_peers
from lms.intercept.side_effects import PEERS, UNKNOWN_STATE, cannot_be_undone
from lms.ir.op_traits import GATHERS, GROUPED
from lms.reader.node_table import NodeTable

pytestmark = pytest.mark.tensorflow

CPU = "/job:localhost/replica:0/task:0/device:CPU:0"
FLOAT = tf.float32.as_datatype_enum
ROWS = ((1.0, 2.0), (3.0, 4.0))


def graph_of(*collectives: tuple[str, str, list[str]]) -> Any:
    """Return a GraphDef with two constants, and collectives as name, type and inputs."""
    graph_def = graph_pb2.GraphDef()
    for number, name in enumerate("xy"):
        node = graph_def.node.add(name=name, op="Const", device=CPU)
        node.attr["dtype"].type = FLOAT
        node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto([row[number] for row in ROWS], tf.float32))
    for name, op_type, inputs in collectives:
        node = graph_def.node.add(name=name, op=op_type, device=CPU, input=inputs)
        node.attr["T"].type = FLOAT
        node.attr["reduce_op"].i = 1
        if op_type == GROUPED:
            node.attr["num_tensors"].i = sum(text[0] != "^" for text in inputs)
    return graph_def


def values(graph_def: Any, *names: str, ranks: int = 3) -> list[Any]:
    """Run a graph without its peers, and return what these outputs are."""
    apart = graph_pb2.GraphDef.FromString(without_peers(graph_def.SerializeToString(), ranks))
    with tf.Graph().as_default() as graph:
        found = tf.import_graph_def(
            apart, return_elements=[name if ":" in name else f"{name}:0" for name in names]
        )
        with tf.compat.v1.Session(graph=graph) as session:
            return [one.tolist() for one in session.run(found)]


def test_a_copy_stands_for_a_sum_and_for_a_broadcast() -> None:
    graph_def = graph_of(("a", "HorovodAllreduce", ["x"]), ("b", "HorovodBroadcast", ["a", "^y"]))
    assert values(graph_def, "a", "b") == [[1, 3], [1, 3]]
    apart = graph_pb2.GraphDef.FromString(without_peers(graph_def.SerializeToString(), 2))
    assert [(node.op, *node.input) for node in apart.node][2:] == [("DeepCopy", "x"), ("DeepCopy", "a", "^y")]


def test_each_tensor_of_a_group_is_copied() -> None:
    graph_def = graph_of(
        ("g", GROUPED, ["x", "y"]), ("first", "Identity", ["g"]), ("last", "Identity", ["g:1"])
    )
    graph_def.node.add(name="waits", op="NoOp", device=CPU, input=["^g"])
    for node in graph_def.node[3:5]:
        del node.attr["reduce_op"]
    assert values(graph_def, "first", "last") == [[1, 3], [2, 4]]


def test_a_gathering_has_the_rows_of_so_many_ranks() -> None:
    assert values(graph_of(("n", GATHERS, ["x"])), "n") == [[1, 3, 1, 3, 1, 3]]


@pytest.mark.parametrize(
    ("op_type", "why"),
    [
        ("HorovodAllreduce", ""),
        ("HorovodAllgather", ""),
        ("HorovodSize", ""),
        ("HorovodAlltoall", PEERS),
        ("CollectiveReduceV2", PEERS),
        ("PrintV2", UNKNOWN_STATE),
        ("WriteScalarSummary", UNKNOWN_STATE),
        ("LookupTableInsertV2", UNKNOWN_STATE),
        ("AnOpOfTheUsers", UNKNOWN_STATE),
        ("MakeIterator", UNKNOWN_STATE),
        ("RandomUniform", ""),
        ("AssignAddVariableOp", ""),
    ],
)
def test_a_step_runs_apart_where_that_can_be_undone(op_type: str, why: str) -> None:
    table = NodeTable.of(graph_of(("a", "HorovodAllreduce", ["x"]), ("one", op_type, ["y"])))
    assert cannot_be_undone(table, (), (), apart=True) == why
    assert cannot_be_undone(table, (), ()) == PEERS


def test_a_step_does_not_run_apart_in_a_process_set_or_a_loop() -> None:
    graph_def = graph_of(("a", "HorovodAllreduce", ["x"]))
    graph_def.node[-1].attr["process_set_id"].i = 1
    assert cannot_be_undone(NodeTable.of(graph_def), (), (), apart=True) == PEERS
    graph_def = graph_of(("into", "Enter", ["x"]), ("a", "HorovodAllreduce", ["into"]))
    graph_def.node[-2].attr["frame_name"].s = b"loop"
    assert cannot_be_undone(NodeTable.of(graph_def), (), (), apart=True) == PEERS
