"""Which of several equal ops a sum reads is settled before a graph is edited."""

from typing import Any

import pytest
from child_job import run_job

tf = pytest.importorskip("tensorflow")

from lms.equal_terms import settle, undo  # noqa: E402

pytestmark = pytest.mark.tensorflow


@pytest.mark.parametrize("legacy_keras", ["0", "1"])
def test_a_generator_and_its_critic_train_to_the_same_bits(legacy_keras: str) -> None:
    seen = run_job("equal_terms_job.py", TF_USE_LEGACY_KERAS=legacy_keras)
    assert [seen[name][0] for name in ("all", "nothing")] == [0, 0]
    assert seen["all"][1] > 2 and seen["nothing"][1] == 0


def traced(waits: bool, terms: int = 3) -> Any:
    """A function with equal ops ``a/equal`` and ``z/equal``, each a term of a sum of its own."""

    @tf.function(input_signature=[tf.TensorSpec([8])])  # type: ignore[untyped-decorator]
    def sums(x: Any) -> Any:
        made = []
        for scope, first in (("a", 2.0), ("z", 20.0)):
            with tf.control_dependencies([x] if waits else []):
                equal = tf.sinh(x, name=f"{scope}/equal")
            others = [tf.cosh(x * (first + number), name=f"m/{scope}_{number}") for number in range(1, terms)]
            made.append(tf.raw_ops.AddN(inputs=[equal, *others], name=f"{scope}/sum"))
        return made

    return sums.get_concrete_function().graph


def inputs(graph: Any) -> list[list[str]]:
    return [
        [tensor.name for tensor in op.inputs] + [before.name for before in op.control_inputs]
        for op in graph.get_operations()
    ]


@pytest.mark.parametrize("waits", [False, True])
def test_both_sums_read_the_one_that_remains_until_it_is_undone(waits: bool) -> None:
    graph = traced(waits)
    before = inputs(graph)
    changes = settle(graph)
    read = {graph.get_operation_by_name(f"{scope}/sum").inputs[0].op.name for scope in "az"}
    assert len(changes) == 1 and len(read) == 1
    undo(changes)
    assert inputs(graph) == before


def test_an_op_that_waits_for_two_that_do_not_remain_waits_for_them_again() -> None:
    @tf.function(input_signature=[tf.TensorSpec([8])])  # type: ignore[untyped-decorator]
    def sums(x: Any) -> Any:
        made = []
        for scope, factor in (("a", 2.0), ("z", 3.0)):
            terms = [tf.sinh(x, name=f"{scope}/equal"), tf.cosh(x, name=f"{scope}/other")]
            with tf.control_dependencies(terms):
                made.append(tf.exp(x * factor, name=f"{scope}/waiting"))
            third = tf.tanh(x * factor, name=f"m/{scope}")
            made.append(tf.raw_ops.AddN(inputs=[*terms, third], name=f"{scope}/sum"))
        return made

    graph = sums.get_concrete_function().graph
    before = inputs(graph)
    changes = settle(graph)
    waits = [
        {before.name for before in graph.get_operation_by_name(f"{scope}/waiting").control_inputs}
        for scope in "az"
    ]
    assert len(changes) == 4 and waits[0] == waits[1]
    undo(changes)
    assert inputs(graph) == before


def test_sums_of_two_and_optimizers_that_merge_nothing_need_no_choice() -> None:
    assert not settle(traced(waits=False, terms=2))
    tf.config.optimizer.set_experimental_options({"arithmetic_optimization": False})
    try:
        assert not settle(traced(waits=False))
    finally:
        tf.config.optimizer.set_experimental_options({"arithmetic_optimization": True})
