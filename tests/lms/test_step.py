"""Which ops of a graph run: those of a session's training step, or of a function."""

from typing import Any

import pytest

tf = pytest.importorskip("tensorflow")

from lms.step import is_update, running_ops, step_ops  # noqa: E402

pytestmark = pytest.mark.tensorflow


class Op:
    """As much of a TensorFlow op as counts: what it reads, and who reads it."""

    def __init__(self, name: str, *needs: "Op") -> None:
        self.name, self.inputs, self.control_inputs = name, (), needs
        self.outputs: tuple[Any, ...] = ()
        self._control_outputs: list[Op] = []
        for op in needs:
            op._control_outputs.append(self)


def test_the_step_is_what_the_backward_pass_leads_to_and_needs() -> None:
    weight = Op("weight")
    start = Op("assign start value", weight)
    forward = Op("forward", weight)
    loss, accuracy, save = Op("loss", forward), Op("accuracy", forward), Op("save", weight)
    backward = Op("gradient", forward)
    rate = Op("learning rate")
    update = Op("update", backward, weight, rate)
    count = Op("count steps", update)
    graph = [weight, start, forward, loss, accuracy, save, backward, rate, update, count]
    found = step_ops(graph, lambda op: op is backward)
    assert found == [weight, forward, backward, rate, update, count]
    assert step_ops(graph, lambda op: False) == graph


def test_a_function_runs_what_leads_to_its_results_and_what_has_an_effect() -> None:
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, (8, 8), name="x")
        tf.raw_ops.Print(input=tf.exp(x, name="shown"), data=[x], name="print")
        result = tf.tanh(x, name="result")
        tf.sin(tf.cos(x, name="cosine"), name="unread")
        waiting = tf.no_op(name="waiting")
    found = running_ops({op: op.type for op in graph.get_operations()}, [result.op, waiting])
    assert {op.name for op in found} == {"x", "shown", "print", "result", "waiting"}


def test_what_changes_a_variable() -> None:
    changing = [
        "ResourceApplyAdam",
        "ApplyMomentum",
        "AssignAddVariableOp",
        "ResourceScatterAdd",
        "ScatterUpdate",
    ]
    assert all(map(is_update, changing))
    assert not any(map(is_update, ["ReadVariableOp", "ScatterNd", "Relu", "VarHandleOp"]))
