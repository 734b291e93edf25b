"""Which gradient an update waits for, and what waits for variables to leave, by graphs made by hand."""

import pytest

pytest.importorskip("tensorflow")
import tensorflow as tf
from tensorflow.core.framework import graph_pb2

from lms.optimizer.grappler_item import Output
from lms.reader.node_table import NodeTable
from lms.rewriter.streamable import UNANCHORED, Finder

pytestmark = pytest.mark.tensorflow

FLOAT = tf.float32.as_datatype_enum
VALUES, NUMBER = Output(FLOAT, (1024,)), Output(FLOAT, ())
Nodes = dict[str, tuple[str, tuple[str, ...]]]
STEP: Nodes = {
    "w": ("_Arg", ()),
    "read": ("ReadVariableOp", ("w",)),
    "made": ("MatMul", ("batch", "read")),
    "gradients/slope": ("MatMul", ("made", "batch")),
}
UPDATE: Nodes = {"update": ("ResourceApplyGradientDescent", ("w", "gradients/slope", "^read"))}


def finder(nodes: Nodes, known: dict[str, Output]) -> Finder:
    graph_def = graph_pb2.GraphDef()
    for name, (op_type, inputs) in nodes.items():
        graph_def.node.add(name=name, op=op_type, input=inputs, device="/device:CPU:0")
    table = NodeTable.of(graph_def)
    return Finder(table, [[VALUES] for _ in table.nodes], known, lambda device: True, 256, ())


def gates(nodes: Nodes) -> dict[str, list[str]]:
    found = finder({"batch": ("IteratorGetNext", ()), **STEP, **nodes}, {"w": VALUES})
    names = found._table.names
    return {names[one.handle]: [names[gate] for gate in one.gates] for one in found.variables()}


def test_an_update_waits_for_the_gradient_that_other_ranks_have_added_to() -> None:
    reduced = ("ResourceApplyGradientDescent", ("w", "scaled", "^read"))
    nodes: Nodes = {
        "sum": ("HorovodAllreduce", ("gradients/slope",)),
        "scaled": ("Mul", ("sum", "sum")),
        "update": reduced,
        "result": ("_Retval", ("made",)),
    }
    assert gates(nodes) == {"w": ["sum"]}


def test_an_average_of_values_behind_their_update_is_no_gradient() -> None:
    """Each rank takes a step, then all take the average of their values."""
    nodes: Nodes = {
        **UPDATE,
        "after": ("ReadVariableOp", ("w", "^update")),
        "average": ("HorovodAllreduce", ("after",)),
        "set": ("AssignVariableOp", ("w", "average", "^after")),
        "result": ("_Retval", ("made",)),
    }
    assert gates(nodes) == {"w": ["gradients/slope"]}


@pytest.mark.parametrize(
    ("batch", "counts_behind", "anchor"),
    [("_Arg", False, "count"), ("IteratorGetNext", False, None), ("IteratorGetNext", True, "count")],
)
def test_in_a_function_that_returns_nothing_what_counts_steps_waits_for_variables_to_leave(
    batch: str, counts_behind: bool, anchor: str | None
) -> None:
    """But not what counts them also when no batch is left."""
    one = ("Identity", ("made",)) if counts_behind else ("Const", ())
    nodes: Nodes = {
        "batch": (batch, ()),
        **STEP,
        **UPDATE,
        "steps": ("_Arg", ()),
        "one": one,
        "count": ("AssignAddVariableOp", ("steps", "one")),
    }
    found = finder(nodes, {"w": VALUES, "steps": NUMBER})
    variables = [*found.variables()]
    assert len(variables) == (anchor is not None)
    assert found.stay[UNANCHORED] == (anchor is None)
    chosen = found.anchor(variables)
    assert (None if chosen is None else found._table.names[chosen]) == anchor


def test_variables_that_are_updated_twice_wait_for_gradients_before_all_updates() -> None:
    """As a critic that is trained twice in a step: what comes later of one waits for the other."""
    nodes: Nodes = {
        "v": ("_Arg", ()),
        "read_v": ("ReadVariableOp", ("v",)),
        "made_v": ("MatMul", ("made", "read_v")),
        "gradients/slope_v": ("MatMul", ("made_v", "made")),
        "update": ("ResourceApplyGradientDescent", ("w", "gradients/slope", "^read")),
        "update_v": ("ResourceApplyGradientDescent", ("v", "gradients/slope_v", "^read_v")),
        "read_2": ("ReadVariableOp", ("w", "^update")),
        "read_v2": ("ReadVariableOp", ("v", "^update_v")),
        "made_2": ("MatMul", ("batch", "read_2")),
        "made_v2": ("MatMul", ("made_2", "read_v2")),
        "gradients/slope_2": ("MatMul", ("made_v2", "read_v2")),
        "gradients/slope_v2": ("MatMul", ("made_v2", "made_2")),
        "update_2": ("ResourceApplyGradientDescent", ("w", "gradients/slope_2", "^read_2")),
        "update_v2": ("ResourceApplyGradientDescent", ("v", "gradients/slope_v2", "^read_v2")),
        "result": ("_Retval", ("made",)),
    }
    found = finder({"batch": ("IteratorGetNext", ()), **STEP, **nodes}, {"w": VALUES, "v": VALUES})
    names = found._table.names
    gates_of = {names[one.handle]: {names[gate] for gate in one.gates} for one in found.variables()}
    assert gates_of["w"] >= {"gradients/slope"} and not any(gate.endswith("2") for gate in gates_of["w"])
    assert gates_of["v"] >= {"gradients/slope_v"} and "gradients/slope_v2" not in gates_of["v"]


def test_updates_that_need_all_gradients_wait_for_what_is_made_of_them() -> None:
    """A global norm. A ratio that is made of a variable's value cannot come before it, as in LAMB."""
    nodes: Nodes = {
        "v": ("_Arg", ()),
        "read_v": ("ReadVariableOp", ("v",)),
        "made_v": ("MatMul", ("batch", "read_v")),
        "gradients/slope_v": ("MatMul", ("made_v", "batch")),
        "norm_w": ("L2Loss", ("gradients/slope",)),
        "norm_v": ("L2Loss", ("gradients/slope_v",)),
        "norm": ("AddN", ("norm_w", "norm_v")),
        "clipped_w": ("Mul", ("gradients/slope", "norm")),
        "clipped_v": ("Mul", ("gradients/slope_v", "norm")),
        "late": ("ReadVariableOp", ("v",)),
        "length": ("L2Loss", ("late",)),
        "ratio": ("Mul", ("length", "norm")),
        "scaled_v": ("Mul", ("clipped_v", "ratio")),
        "update": ("ResourceApplyGradientDescent", ("w", "clipped_w", "^read")),
        "update_v": ("ResourceApplyGradientDescent", ("v", "scaled_v", "^read_v")),
        "result": ("_Retval", ("made",)),
    }
    found = finder({"batch": ("IteratorGetNext", ()), **STEP, **nodes}, {"w": VALUES, "v": VALUES})
    numbers = {"norm_w", "norm_v", "norm", "length", "ratio"}
    names = found._table.names
    found._outputs = [[NUMBER if name in numbers else VALUES] for name in names]
    assert {names[one.handle]: [names[gate] for gate in one.gates] for one in found.variables()} == {
        "w": ["gradients/slope", "norm"],
        "v": ["gradients/slope_v", "norm"],
    }
