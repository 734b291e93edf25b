"""What TensorFlow merges into one kernel stays mergeable in an edited graph."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")

from detouring import lead_round  # noqa: E402
from tensorflow.python.framework.func_graph import FuncGraph  # noqa: E402

from lms.kernels import BETWEEN, find_groups  # noqa: E402
from lms.tf_graph import has_onednn, read_graph, schedule  # noqa: E402

pytestmark = pytest.mark.tensorflow


def graph_of(make: Callable[[Any], Any]) -> Any:
    graph = tf.Graph()
    with graph.as_default():
        make(tf.compat.v1.placeholder(tf.float32, (8, 8), name="x"))
    return graph


def groups_of(make: Callable[[Any], Any]) -> list[list[str]]:
    found = find_groups(graph_of(make).get_operations())
    return [[op.name for op in group.members] for group in found]


def dense(x: Any) -> Any:
    product = tf.matmul(x, tf.ones((8, 8)), name="product")
    return tf.tanh(tf.nn.bias_add(product, tf.ones((8,)), name="bias"), name="active")


def swish(x: Any) -> Any:
    read = tf.exp(x, name="read")
    return tf.multiply(read, tf.sigmoid(read, name="gate"), name="swish")


def test_a_layer_a_swish_and_a_chain_of_sums_are_groups() -> None:
    assert groups_of(dense) == [["product", "bias", "active"]]
    assert groups_of(swish) == [["gate", "swish"]]
    scaled = groups_of(lambda x: tf.multiply(tf.multiply(x, x[0], name="inner"), x, name="outer"))
    assert scaled == [["inner", "outer"]], "the smaller factors come first"
    assert groups_of(lambda x: tf.multiply(tf.multiply(x, x), x)) == []
    twice = groups_of(lambda x: tf.multiply(tf.multiply(x[0], x, name="a"), x, name="b") * x)
    assert twice == [["a", "b", "mul"]], "all factors of a tree are taken together"
    halved = groups_of(lambda x: tf.divide(tf.multiply(x, tf.exp(x), name="inner"), 2.0, name="halved"))
    assert halved == [["inner", "halved"]], "a division by a constant is a product with its reciprocal"
    assert groups_of(lambda x: tf.divide(tf.multiply(x, tf.exp(x)), tf.sin(x))) == []
    sums = groups_of(lambda x: tf.add(tf.add(x, tf.exp(x), name="inner"), tf.sin(x), name="outer"))
    assert sums == [["inner", "outer"]]


def test_what_others_read_or_wait_for_is_merged_with_nothing() -> None:
    def read_twice(x: Any) -> Any:
        product = tf.matmul(x, x, name="product")
        return tf.nn.bias_add(product, tf.ones((8,))), tf.nn.softplus(product)

    def waited_for(x: Any) -> Any:
        product = tf.matmul(x, x)
        with tf.control_dependencies([product]):
            return tf.nn.bias_add(product, tf.ones((8,)))

    assert groups_of(read_twice) == groups_of(waited_for) == []


def test_what_a_function_does_not_run_keeps_nothing_from_being_merged() -> None:
    """As where a tape needs the slope of a layer, and nobody its result."""

    @tf.function
    def slope(x: Any) -> Any:
        biased = tf.nn.bias_add(tf.matmul(x, x, name="product"), tf.ones((8,)), name="bias")
        tf.nn.softplus(biased, name="unread")
        return tf.sigmoid(biased, name="slope")

    view = read_graph(slope.get_concrete_function(tf.TensorSpec((8, 8))).graph, "CPU")
    assert [[op.name for op in group.members] for group in view.groups] == [["product", "bias", "slope"]]
    assert "unread" not in {op.name for op in view.ops}


def test_what_is_between_stays_on_the_device() -> None:
    graph = graph_of(dense)
    view = read_graph(graph, "CPU", outputs=[graph.get_tensor_by_name("active:0")])
    names = {view.graph.tensor_name(tensor.id): tensor.forbidden for tensor in view.graph.tensors}
    assert names["product:0"] == names["bias:0"] == BETWEEN
    assert names["active:0"] is None


def normalised(x: Any, relu: Callable[..., Any] = tf.nn.relu) -> Any:
    image, ones, none = tf.reshape(x, (1, 4, 4, 4)), tf.ones(4), tf.zeros(0)
    made = tf.raw_ops.FusedBatchNormV3(
        x=image, scale=ones, offset=ones, mean=none, variance=none, is_training=True, name="norm"
    )
    result = relu(made.y, name="active")
    tf.multiply(made.batch_mean, 2.0, name="mean")
    return tf.raw_ops.FusedBatchNormGradV3(
        y_backprop=result,
        x=image,
        scale=ones,
        reserve_space_1=made.reserve_space_1,
        reserve_space_2=made.reserve_space_2,
        reserve_space_3=made.reserve_space_3,
        name="slope",
    )


def test_a_normalisation_and_its_activation_are_a_group() -> None:
    assert groups_of(normalised) == [["norm", "active"]]
    assert groups_of(lambda x: normalised(x, tf.tanh)) == []


@pytest.mark.parametrize("before", ["early", "mean"])
def test_a_normalisation_stays_as_it_is_where_its_activation_waits_for_who_reads_it(before: str) -> None:
    graph = graph_of(lambda x: (tf.exp(x, name="early"), normalised(x)))
    active, mean = (graph.get_operation_by_name(name) for name in ("active", "mean"))
    order = [op for op in graph.get_operations() if op is not mean]
    order.insert(order.index(active), mean)
    lead_round(graph, order, [(before, "active")])
    assert bool(active.control_inputs) == (before == "mean")
    assert len(schedule(graph.get_operations())) == len(graph.get_operations())


@pytest.mark.skipif(not has_onednn(), reason="merges no normalisation")
def test_what_a_normalisation_reserves_is_made_with_its_activation() -> None:
    graph = graph_of(normalised)
    view = read_graph(graph, "CPU", outputs=[graph.get_operation_by_name("slope").outputs[0]])
    norm, active = (next(op for op in view.graph.ops if op.name == name) for name in ("norm", "active"))
    assert view.tensors[active.outputs[1]] is graph.get_tensor_by_name("norm:5")
    a_number_each = 64 * 4  # of four channels
    assert [view.graph.tensors[tensor].nbytes for tensor in active.outputs] == [64 * 4, a_number_each]
    assert norm.workspace_bytes == a_number_each
    assert [view.graph.tensors[tensor].forbidden for tensor in norm.outputs][:2] == [BETWEEN, None]


@pytest.mark.skipif(not has_onednn(), reason="merges no normalisation")
def test_a_normalisation_is_merged_with_its_activation_where_its_other_readers_do_not_run() -> None:
    graph = FuncGraph("step")
    with graph.as_default():
        graph.outputs = [normalised(tf.compat.v1.placeholder(tf.float32, (8, 8), name="x"))[0]]
        for output in ("norm:0", "norm:5"):
            tf.identity(graph.get_tensor_by_name(output), name="unread")
    view = read_graph(graph, "CPU")
    assert "unread" not in {op.name for op in view.graph.ops}
    active = next(op for op in view.graph.ops if op.name == "active")
    assert view.tensors[active.outputs[1]] is graph.get_tensor_by_name("norm:5")


def detoured(make: Callable[[Any], Any], edges: list[tuple[str, str]]) -> Any:
    """The graph with further ops and control edges, taken off its groups.

    ``early`` comes first and ``late`` last; ``middle`` comes before the op to which the first edge leads.
    """
    graph = graph_of(make)
    with graph.as_default():
        x = graph.get_tensor_by_name("x:0")
        for name in ("early", "middle", "late"):
            tf.cos(x, name=name)
    early, middle = (graph.get_operation_by_name(name) for name in ("early", "middle"))
    order = [early, *(op for op in graph.get_operations() if op not in (early, middle))]
    order.insert(next(place for place, op in enumerate(order) if op.name == edges[0][1]), middle)
    groups = lead_round(graph, order, edges)
    for group in groups:
        assert not any(op.control_inputs or op._control_outputs for op in group.members)
    assert len(schedule(graph.get_operations())) == len(graph.get_operations())
    return graph


def waits(graph: Any, name: str) -> set[str]:
    """All ops that one waits for, by whatever way."""
    found: set[str] = set()
    open_ops = [graph.get_operation_by_name(name)]
    while open_ops:
        op = open_ops.pop()
        for before in [*(tensor.op for tensor in op.inputs), *op.control_inputs]:
            if before.name not in found:
                found.add(before.name)
                open_ops.append(before)
    return found


def test_edges_go_round_a_group() -> None:
    graph = detoured(dense, [("early", "bias"), ("active", "late")])
    assert "early" in waits(graph, "active")
    assert "active" in waits(graph, "late")


def test_what_stands_between_the_ops_of_a_group_waits_for_none_of_them() -> None:
    graph = detoured(dense, [("middle", "active"), ("early", "product"), ("product", "middle")])
    assert {"middle", "early"} <= waits(graph, "active")
    assert "early" in waits(graph, "middle")
    assert "product" not in waits(graph, "middle")


def test_a_detour_changes_no_value() -> None:
    value = np.linspace(-1, 1, 64, dtype="f").reshape(8, 8)
    for make, last in ((dense, "active"), (swish, "swish")):
        edges = [("early", last), (last, "late")]
        graphs = graph_of(make), detoured(make, edges)
        seen = []
        for graph in graphs:
            with tf.compat.v1.Session(graph=graph) as session:
                seen.append(session.run(f"{last}:0", {"x:0": value}).tobytes())
        assert seen[0] == seen[1]


def test_what_may_take_the_result_over_reads_it_where_nobody_else_holds_it_then() -> None:
    def read(x: Any) -> None:
        result = dense(x)
        tf.subtract(result, 1.0, name="taker")
        tf.matmul(result, result, name="other")

    graph = detoured(read, [("early", "active"), ("active", "late")])
    taker, other = (graph.get_operation_by_name(name) for name in ("taker", "other"))
    probe = taker.inputs[0].op
    assert probe.inputs[0].op.name == "active" and probe in graph.get_operation_by_name("late").control_inputs
    assert {tensor.op.name for tensor in other.inputs} == {"active"}
