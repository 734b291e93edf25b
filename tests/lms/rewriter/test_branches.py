"""Ops under a condition: others wait for them, and they for the gradient that their result is added to."""

from importlib.metadata import version

import pytest
from child_job import run_job

pytestmark = pytest.mark.tensorflow
LIMIT_MB = 58


@pytest.fixture(name="graph")
def _graph() -> object:
    pytest.importorskip("tensorflow")
    from tensorflow.core.framework import graph_pb2

    graph = graph_pb2.GraphDef()
    for name, op_type, read in (
        ("batch", "Placeholder", ()),
        ("predicate", "Placeholder", ()),
        ("momentum", "VarHandleOp", ()),
        ("rate", "VarHandleOp", ()),
        ("hidden", "Relu", ("batch",)),
        ("gradients/hidden", "ReluGrad", ("hidden", "batch")),
        ("let_momentum", "Switch", ("momentum", "predicate")),
        ("let_rate", "Switch", ("rate", "predicate")),
        ("let_gradient", "Switch", ("gradients/hidden", "predicate")),
        ("read", "ReadVariableOp", ("let_momentum:1",)),
        ("slowed", "Mul", ("read", "read")),
        ("read_rate", "ReadVariableOp", ("let_rate:1",)),
        ("scaled", "Mul", ("let_gradient:1", "read_rate")),
        ("sum", "Sub", ("slowed", "scaled")),
        ("update", "AssignVariableOp", ("let_momentum:1", "sum")),
    ):
        node = graph.node.add(name=name, op=op_type)
        node.input.extend(read)
    return graph


@pytest.mark.parametrize(("least", "held"), [(64, ["let_momentum"]), (4096, [])])
def test_a_switch_waits_for_the_gradient_where_something_large_would_come_early(
    graph: object, least: int, held: list[str]
) -> None:
    from lms.optimizer.grappler_item import Output
    from lms.reader.node_table import NodeTable
    from lms.rewriter.branches import hold_back

    table = NodeTable.of(graph)
    small = {"rate", "let_rate", "read_rate", "predicate"}
    outputs = [[Output(1, () if name in small else (16, 16))] for name in table.names]
    assert hold_back(table, outputs, 0, least)[1] == 2 * 1024 * len(held)
    assert [node.name for node in table.nodes if "^gradients/hidden" in node.input] == held
    again = NodeTable.of(graph)
    assert not hold_back(again, outputs, 0, least)[1]


def test_accumulated_gradients_train_near_the_limit() -> None:
    """Without the edges the update ran out of memory, in the third step."""
    if version("tensorflow").startswith("2.15"):
        pytest.skip("Keras 2 accumulates no gradients")
    plain = run_job("rewriter/accumulation_job.py", "off")
    found = run_job("rewriter/accumulation_job.py", "auto", TF_CPU_BFC_MEM_LIMIT_IN_MB=str(LIMIT_MB))
    assert found["bits"] == plain["bits"]
    assert found["warnings"] == [] and found["ops"] > 0


def test_what_a_condition_leaves_out_keeps_nothing_from_running() -> None:
    """One update of four is under a second condition, within the first: nothing tells what it waits for."""
    found = run_job("rewriter/conditional_job.py")
    assert found["all"] == found["host"] == found["filled"] == found["off"]
    assert found["filled_warnings"] == []
    for mode, streamed in (("all", [0, 0]), ("host", [4, 3])):
        assert found[f"{mode}_exits"] > 0, mode
        planned, ran = found[f"{mode}_copies"]
        assert planned == ran > 0, mode
        assert found[f"{mode}_streamed"] == streamed
    assert found["all_warnings"] == []
    (said,) = found["host_warnings"]
    assert "1 variable cannot lie on the host: an update waits for nothing that the step computes" in said


def test_another_node_runs_behind_those_that_a_condition_leaves_out(graph: object) -> None:
    from lms.reader.conditions import find_conditions
    from lms.reader.node_table import NodeTable
    from lms.rewriter.branches import Exits

    table = NodeTable.of(graph)
    conditions = find_conditions(table, 0)
    number = table.number
    assert table.users(number["momentum"]) == {number["read"], number["update"]}
    assert table.users(number["predicate"]) == set()
    assert table.handle(number["let_momentum"]) == number["momentum"]
    assert conditions.runs_with(number["slowed"], number["update"])
    assert not conditions.runs_with(number["slowed"], number["gradients/hidden"])
    assert conditions.predicate(number["hidden"]) is None
    assert table.names[conditions.predicate(number["update"]).node] == "predicate"

    added = {}

    def add(name: str, purpose: str) -> object:
        added[name] = graph.node.add(name=name)
        return added[name]

    made = Exits(table, conditions, add).write("passed", [number["update"], number["slowed"]])
    assert made.keys() == added.keys() == {"passed", "passed/runs"}
    assert list(added["passed"].input) == ["passed/runs", "^update", "^slowed"]
    assert list(added["passed/runs"].input) == ["^predicate"]
    edited = NodeTable.of(graph)
    assert find_conditions(edited, 0).of_node[edited.number["passed"]] == frozenset()
