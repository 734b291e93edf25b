"""Which ops of a session's graph make up the training step."""

from typing import Any

from lms.step import is_update, step_ops


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
