"""Which gradient an update waits for, and what waits for variables to leave, by graphs made by hand."""

import pytest

pytest.importorskip("tensorflow")
import tensorflow as tf
from tensorflow.core.framework import graph_pb2

from lms.optimizer.grappler_item import Output
from lms.reader.node_table import NodeTable
from lms.rewriter.streamable import LOOKED_UP, UNANCHORED, Finder

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


def gates_of(nodes: Nodes, *numbers: str) -> tuple[dict[str, list[str]], dict[str, int]]:
    """The gates of each variable that streams, and why others stay; ``numbers``: nodes that make one."""
    known = {
        name: NUMBER if name in numbers else VALUES
        for name, (op_type, _) in nodes.items()
        if op_type == "_Arg"
    }
    found = finder({"batch": ("IteratorGetNext", ()), **STEP, **nodes}, {"w": VALUES, **known})
    names, types = found._table.names, found._table.types
    found._outputs = [
        [NUMBER if name in numbers else VALUES] * (2 if op_type == "Switch" else 1)
        for name, op_type in zip(names, types, strict=True)
    ]
    made = {names[one.handle]: [names[gate] for gate in one.gates] for one in found.variables()}
    return made, dict(found.stay)


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
    made, _ = gates_of(nodes)
    assert "gradients/slope" in made["w"] and not any(gate.endswith("2") for gate in made["w"])
    assert "gradients/slope_v" in made["v"] and "gradients/slope_v2" not in made["v"]


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
    made, _ = gates_of(nodes, "norm_w", "norm_v", "norm", "length", "ratio")
    assert made == {
        "w": ["gradients/slope", "norm"],
        "v": ["gradients/slope_v", "norm"],
    }


SECOND: Nodes = {
    "v": ("_Arg", ()),
    "read_v": ("ReadVariableOp", ("v",)),
    "made_v": ("MatMul", ("made", "read_v")),
    "result": ("_Retval", ("made",)),
}


def test_a_gradient_behind_an_update_with_a_rate_is_waited_for() -> None:
    """As a generator's that is trained behind its critic: the learning rate never streams."""
    nodes: Nodes = {
        "rate": ("_Arg", ()),
        **SECOND,
        "read_rate": ("ReadVariableOp", ("rate",)),
        "scaled": ("Mul", ("gradients/slope", "read_rate")),
        "update": ("ResourceApplyGradientDescent", ("w", "scaled", "^read")),
        "read_2": ("ReadVariableOp", ("w", "^update")),
        "made_2": ("MatMul", ("made_v", "read_2")),
        "gradients/slope_v": ("MatMul", ("made_2", "read_2")),
        "scaled_v": ("Mul", ("gradients/slope_v", "read_rate")),
        "update_v": ("ResourceApplyGradientDescent", ("v", "scaled_v", "^read_v")),
    }
    made, stay = gates_of(nodes, "rate", "read_rate")
    assert made == {"w": ["gradients/slope"], "v": ["gradients/slope_v"]} and len(stay) == 1


def test_a_condition_on_the_updated_value_is_no_gate() -> None:
    """A weight that is made shorter where it has become too long."""
    nodes: Nodes = {
        **UPDATE,
        "after": ("ReadVariableOp", ("w", "^update")),
        "length": ("L2Loss", ("after",)),
        "is_long": ("Greater", ("length", "length")),
        "let_w": ("Switch", ("w", "is_long")),
        "read_long": ("ReadVariableOp", ("let_w:1",)),
        "shorter": ("Neg", ("read_long",)),
        "set": ("AssignVariableOp", ("let_w:1", "shorter")),
        "result": ("_Retval", ("made",)),
    }
    assert gates_of(nodes, "length", "is_long") == ({"w": ["gradients/slope"]}, {})


def test_what_nothing_updates_is_copied_also_for_an_update() -> None:
    """A mask of pruned weights: its value lies in host memory, which no kernel of a GPU reads."""
    nodes: Nodes = {
        "mask": ("_Arg", ()),
        "read_mask": ("ReadVariableOp", ("mask",)),
        "masked": ("Mul", ("gradients/slope", "read_mask")),
        "update": ("ResourceApplyGradientDescent", ("w", "masked", "^read")),
        "result": ("_Retval", ("made",)),
    }
    found = finder({"batch": ("IteratorGetNext", ()), **STEP, **nodes}, {"w": VALUES, "mask": VALUES})
    mask = next(one for one in found.variables() if found._table.names[one.handle] == "mask")
    assert [found._table.names[read] for read in mask.early] == ["read_mask"] and not mask.late


def test_rows_that_are_read_behind_a_later_update_keep_a_variable() -> None:
    """The look-up waits for a variable whose update waits for this one's."""
    nodes: Nodes = {
        **SECOND,
        "gradients/slope_v": ("MatMul", ("made_v", "made")),
        "late": ("ReadVariableOp", ("v", "^read_v")),
        "length": ("L2Loss", ("late",)),
        "rows": ("ResourceGather", ("w", "batch", "^length")),
        "update": ("ResourceApplyGradientDescent", ("w", "gradients/slope", "^read", "^rows")),
        "scaled": ("Mul", ("gradients/slope_v", "length")),
        "update_v": ("ResourceApplyGradientDescent", ("v", "scaled", "^update")),
    }
    made, stay = gates_of(nodes, "length")
    assert "w" not in made and stay == {LOOKED_UP: 1}
