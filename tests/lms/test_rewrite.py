"""Reading a TensorFlow graph and applying hand-made plans to it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")

from tensorflow.python.framework.func_graph import FuncGraph  # noqa: E402

from lms import tf_graph  # noqa: E402
from lms.errors import UnreadableError  # noqa: E402
from lms.graph import Use  # noqa: E402
from lms.host_reads import read_from_host  # noqa: E402
from lms.op_types import is_backward  # noqa: E402
from lms.rewrite import MARK_ATTR, PROTECT_ATTR, RewriteError, is_edited, relocated, rewrite  # noqa: E402
from lms.serialize import floating_ops  # noqa: E402
from lms.shapes import ShapeHints, complete_shapes  # noqa: E402
from lms.swap_plan import SerialEdge, Swap, SwapIn, SwapPlan  # noqa: E402
from lms.tf_graph import (  # noqa: E402
    PLACES,
    GraphView,
    has_backward_pass,
    read_graph,
    schedule,
)
from lms.transports.pyfunc import NumpyTransport  # noqa: E402
from lms.twins import BEHIND_BARRIER  # noqa: E402

pytestmark = pytest.mark.tensorflow


def build(make: Callable[[], Any]) -> tuple[Any, GraphView]:
    graph = tf.Graph()
    with graph.as_default():
        made = make()
    return graph, read_graph(graph, "CPU", outputs=[made])


def chain() -> Any:
    """Three ops in a row, and the first one read again at the end through a reshape."""
    x = tf.compat.v1.placeholder(tf.float32, (64, 64), name="x")
    a = tf.tanh(x, name="a")
    b = tf.exp(a, name="b")
    c = tf.nn.softplus(b, name="c")
    again = tf.reshape(a, (4096,), name="again")
    return tf.reduce_sum(again * tf.reshape(c, (4096,)), name="loss")


def op_id(view: GraphView, name: str) -> int:
    return next(op.id for op in view.graph.ops if op.name == name)


def plan_of(view: GraphView, swaps: tuple[Swap, ...] = (), edges: tuple[SerialEdge, ...] = ()) -> SwapPlan:
    return SwapPlan("test", tuple(range(len(view.graph.ops))), swaps, edges, (), 0, 0, 0, None)


def swap_a(view: GraphView) -> Swap:
    """Swap ``a`` out behind ``b`` and back behind ``c``; ``c`` waits for the copy to the host."""
    (tensor,) = view.graph.ops[op_id(view, "a")].outputs
    reader = op_id(view, "mul")
    swap_in = SwapIn(op_id(view, "c"), (Use(reader, 0),))
    return Swap(tensor, 16384, op_id(view, "b"), (swap_in,), (op_id(view, "c"),))


def test_a_graph_is_read_with_sizes_aliases_and_what_lies_outside() -> None:
    _, view = build(chain)
    ops = {op.name: op for op in view.graph.ops}
    tensors = view.graph.tensors
    assert tensors[ops["x"].outputs[0]].outside
    assert tensors[ops["a"].outputs[0]].nbytes == 64 * 64 * 4
    assert tensors[ops["again"].outputs[0]].alias_of == ops["a"].outputs[0]
    assert ops["loss"].outputs[0] in view.graph.kept
    assert [op.name for op in view.ops] == [op.name for op in view.graph.ops]
    assert view.unknown == ()


def pooled() -> Any:
    x = tf.compat.v1.placeholder(tf.float32, (2, 8, 8, 4), name="x")
    y = tf.nn.max_pool2d(tf.tanh(x), 2, 2, "VALID", name="pool")
    return tf.gradients(tf.reduce_sum(tf.exp(y)), x)[0]


def test_the_result_of_a_pooling_stays_for_its_gradient_with_the_places_of_the_maxima(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tf_graph, "has_onednn", lambda: True)
    _, view = build(pooled)
    pool = view.graph.ops[op_id(view, "pool")]
    result, places = (view.graph.tensors[tensor] for tensor in pool.outputs)
    assert result.forbidden == places.forbidden == PLACES
    assert (result.nbytes, places.nbytes) == (2 * 4 * 4 * 4 * 4, 2 * 4 * 4 * 4)
    (gradient,) = (op for op in view.graph.ops if op.type == "MaxPoolGrad")
    assert gradient.inputs[-1] == places.id and not gradient.workspace_bytes


def test_without_onednn_the_result_of_a_pooling_may_leave_and_its_gradient_needs_scratch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tf_graph, "has_onednn", lambda: False)
    _, view = build(pooled)
    pool = view.graph.ops[op_id(view, "pool")]
    assert [view.graph.tensors[tensor].forbidden for tensor in pool.outputs] == [None]
    (gradient,) = (op for op in view.graph.ops if op.type == "MaxPoolGrad")
    assert gradient.workspace_bytes == 2 * 4 * 4 * 4 * (4 + 8)


def test_a_plan_is_applied_and_values_stay_the_same() -> None:
    graph, view = build(chain)
    edits = rewrite(graph, view, plan_of(view, (swap_a(view),)), NumpyTransport())
    assert (edits.swap_outs, edits.swap_ins) == (1, 1)
    operations = {op.name: op for op in graph.get_operations()}
    assert len(schedule(list(operations.values()))) == len(operations)
    marked = {name: op for name, op in operations.items() if "/lms/" in name}
    assert {op.name for op in edits.ops} <= set(marked)
    for op in edits.ops:
        assert op.get_attr(MARK_ATTR) in (b"swap_out", b"swap_in", b"alias")
        assert op.get_attr(PROTECT_ATTR)
    held = operations["a/lms/0/swap_out"]
    assert operations["b"] in held.control_inputs
    assert held in operations["c"].control_inputs
    assert operations["c"] in edits.ops[1].control_inputs
    assert operations["mul"].inputs[0].op.type == "Reshape"
    assert operations["mul"].inputs[0].op.inputs[0].op is edits.ops[1]
    with tf.compat.v1.Session(graph=graph) as session:
        fed = {"x:0": [[0.5] * 64] * 64}
        changed = session.run("loss:0", fed)
    original, _ = build(chain)
    with tf.compat.v1.Session(graph=original) as session:
        assert session.run("loss:0", fed) == changed


def test_a_graph_is_edited_once() -> None:
    graph, view = build(chain)
    plan = plan_of(view, (swap_a(view),))
    rewrite(graph, view, plan, NumpyTransport())
    count = len(graph.get_operations())
    assert is_edited(graph)
    with pytest.raises(RewriteError, match="edited once"):
        rewrite(graph, view, plan, NumpyTransport())
    assert len(graph.get_operations()) == count


def refused(view: GraphView, plan: SwapPlan, graph: Any) -> str:
    count = len(graph.get_operations())
    with pytest.raises(RewriteError) as caught:
        rewrite(graph, view, plan, NumpyTransport())
    assert len(graph.get_operations()) == count, "a refused plan changes nothing"
    return str(caught.value)


def test_plans_that_would_make_a_cycle_are_refused_before_anything_changes() -> None:
    graph, view = build(chain)
    swap = swap_a(view)
    b, c, last = (op_id(view, name) for name in ("b", "c", "mul"))
    assert "serial edge: c" in refused(view, plan_of(view, edges=(SerialEdge(c, b),)), graph)
    late = replace(swap, swap_ins=(SwapIn(last, swap.swap_ins[0].uses),))
    assert "swap-in: mul" in refused(view, plan_of(view, (late,)), graph)
    early = replace(swap, swap_ins=(SwapIn(op_id(view, "x"), swap.swap_ins[0].uses),))
    assert "before it was swapped out" in refused(view, plan_of(view, (early,)), graph)
    assert "swap-out blocks" in refused(
        view, plan_of(view, (replace(swap, blocks=(op_id(view, "a"),)),)), graph
    )
    backwards = replace(plan_of(view), order=tuple(reversed(range(len(view.graph.ops)))))
    assert "plan order" in refused(view, backwards, graph)
    short = replace(plan_of(view), order=(0, 1))
    assert "the plan orders 2 ops" in refused(view, short, graph)


def test_serial_edges_are_added_once() -> None:
    def two() -> Any:
        x = tf.compat.v1.placeholder(tf.float32, (8, 8), name="x")
        return tf.add(tf.exp(x, name="one"), tf.tanh(x, name="two"), name="sum")

    graph, view = build(two)
    edge = SerialEdge(op_id(view, "one"), op_id(view, "two"))
    edits = rewrite(graph, view, plan_of(view, edges=(edge, edge)), NumpyTransport())
    assert edits.control_edges == 1
    assert graph.get_operation_by_name("two").control_inputs == [graph.get_operation_by_name("one")]


def test_what_onednn_merges_is_one_op_and_waits_behind_one_gate() -> None:
    def conv() -> Any:
        x = tf.compat.v1.placeholder(tf.float32, (2, 8, 8, 3), name="x")
        gradient = tf.tanh(tf.compat.v1.placeholder(tf.float32, (2, 8, 8, 4)), name="gradient")
        bias = tf.raw_ops.BiasAddGrad(out_backprop=gradient, name="bias")
        other = tf.exp(gradient, name="other")
        kernel = tf.raw_ops.Conv2DBackpropFilter(
            input=x,
            filter_sizes=(3, 3, 3, 4),
            out_backprop=gradient,
            strides=[1, 1, 1, 1],
            padding="SAME",
            name="kernel",
        )
        later = tf.sin(x, name="later")
        return tf.reduce_sum(kernel) + tf.reduce_sum(bias) + tf.reduce_sum(other) + tf.reduce_sum(later)

    graph, view = build(conv)
    merged = op_id(view, "kernel")
    assert view.twins[merged].name == "bias"
    assert "bias" not in {op.name for op in view.graph.ops}
    assert len(view.graph.ops[merged].outputs) == 2
    edges = (SerialEdge(op_id(view, "other"), merged), SerialEdge(merged, op_id(view, "later")))
    rewrite(graph, view, plan_of(view, edges=edges), NumpyTransport())
    (gate,) = {op for name in ("kernel", "bias") for op in graph.get_operation_by_name(name).control_inputs}
    assert gate.type == "Const" and gate.get_attr(PROTECT_ATTR), "what Grappler leaves between the two"
    assert [op.name for op in gate.control_inputs] == ["other"]
    waits_for = {op.name for op in graph.get_operation_by_name("later").control_inputs}
    assert waits_for == {"kernel", "bias"}, "one left alone would keep the gradient"


def test_the_gradient_of_pooling_that_onednn_does_not_take_needs_scratch() -> None:
    def pool() -> Any:
        x = tf.compat.v1.placeholder(tf.float32, (2, 8, 8, 3), name="x")
        pooled = tf.nn.max_pool2d(x, 2, 2, "SAME", name="pool")
        return tf.raw_ops.MaxPoolGrad(
            orig_input=x,
            orig_output=tf.tanh(pooled),
            grad=pooled,
            ksize=[1, 2, 2, 1],
            strides=[1, 2, 2, 1],
            padding="SAME",
            name="slope",
        )

    graph, view = build(pool)
    assert view.graph.ops[op_id(view, "slope")].workspace_bytes == 2 * 4 * 4 * 3 * (4 + 8)
    on_gpu = read_graph(graph, "GPU")
    assert on_gpu.graph.ops[op_id(on_gpu, "slope")].workspace_bytes == 0


def barred_twins(suffix: str = "") -> tuple[Any, Any, Any]:
    """The gradients of a convolution with a bias, and what ``tf.gradients`` puts between the two."""
    x = tf.exp(tf.compat.v1.placeholder(tf.float32, (2, 8, 8, 3)), name="x" + suffix)
    gradient = tf.tanh(tf.compat.v1.placeholder(tf.float32, (2, 8, 8, 4)), name="gradient" + suffix)
    bias = tf.raw_ops.BiasAddGrad(out_backprop=gradient, name="bias" + suffix)
    with tf.control_dependencies([gradient, bias]):
        barrier = tf.no_op("barrier" + suffix)
    with tf.control_dependencies([barrier]):
        behind, bias = tf.identity(gradient, name="behind" + suffix), tf.identity(bias)
    kernel = tf.raw_ops.Conv2DBackpropFilter(
        input=x,
        filter_sizes=(3, 3, 3, 4),
        out_backprop=behind,
        strides=[1, 1, 1, 1],
        padding="SAME",
        name="kernel" + suffix,
    )
    return kernel, bias, behind


def test_a_barrier_between_what_onednn_merges_waits_for_neither() -> None:
    """Grappler takes the barrier away."""

    def conv() -> Any:
        kernel, bias, behind = barred_twins()
        other = tf.exp(behind, name="other")
        return tf.reduce_sum(kernel) + tf.reduce_sum(bias) + tf.reduce_sum(other)

    _, view = build(conv)
    merged, graph = op_id(view, "kernel"), view.graph
    assert view.twins[merged].name == "bias"
    assert "bias" not in {op.name for op in graph.ops}
    assert graph.ops[op_id(view, "barrier")].controls == (op_id(view, "gradient"),)
    assert merged in graph.ops[op_id(view, "other")].controls
    assert graph.tensors[graph.ops[op_id(view, "behind")].outputs[0]].forbidden == BEHIND_BARRIER


def test_a_gradient_of_a_bias_that_does_not_run_is_merged_with_nothing() -> None:
    graph = FuncGraph("step")
    with graph.as_default():
        x = tf.compat.v1.placeholder(tf.float32, (2, 8, 8, 3))
        gradient = tf.tanh(tf.compat.v1.placeholder(tf.float32, (2, 8, 8, 4)))
        tf.raw_ops.BiasAddGrad(out_backprop=gradient, name="unread")
        sizes = {"filter_sizes": (3, 3, 3, 4), "strides": [1, 1, 1, 1], "padding": "SAME"}
        kernel = tf.raw_ops.Conv2DBackpropFilter(input=x, out_backprop=gradient, name="kernel", **sizes)
        graph.outputs = [kernel]
    view = read_graph(graph, "CPU")
    assert not view.twins
    assert len(view.graph.ops[op_id(view, "kernel")].outputs) == 1


def led_round(gradient: Any) -> Any:
    """A filter's gradient behind a bias's gradient of the same slope, as of two updates in one step."""
    bias = tf.raw_ops.BiasAddGrad(out_backprop=gradient, name="bias")
    x = tf.tile(tf.reshape(bias, (1, 1, 1, 4)), (2, 8, 8, 1))
    sizes = {"filter_sizes": (3, 3, 4, 4), "strides": [1, 1, 1, 1], "padding": "SAME"}
    return tf.raw_ops.Conv2DBackpropFilter(input=x, out_backprop=gradient, name="kernel", **sizes)


def test_gradients_of_a_slope_of_zeros_are_merged_with_nothing() -> None:
    """Equal zeros are one op, which then reaches from update to update; the bias's gradient is folded."""
    _, view = build(lambda: led_round(tf.fill((2, 8, 8, 4), 0.0)))
    assert not view.twins and "bias" in {op.name for op in view.graph.ops}


def test_gradients_that_may_be_merged_and_lead_to_each_other_are_told_as_what_they_are() -> None:
    with pytest.raises(UnreadableError, match="that oneDNN may merge one leads to the other"):
        build(lambda: led_round(tf.tanh(tf.compat.v1.placeholder(tf.float32, (2, 8, 8, 4)))))


def test_a_barrier_waits_for_neither_where_one_alone_reads_behind_it() -> None:
    def conv() -> Any:
        kernel, bias, _ = barred_twins()
        return tf.reduce_sum(kernel) + tf.reduce_sum(bias)

    _, view = build(conv)
    assert view.twins[op_id(view, "kernel")].name == "bias"
    assert view.graph.ops[op_id(view, "barrier")].controls == (op_id(view, "gradient"),)


def test_what_reads_behind_two_barriers_waits_for_both() -> None:
    def convs() -> Any:
        (one, _, behind), (other, _, behind_other) = barred_twins(), barred_twins("_other")
        return tf.add(behind, behind_other, name="both") + tf.reduce_sum(one) + tf.reduce_sum(other)

    _, view = build(convs)
    waited = view.graph.ops[op_id(view, "both")].controls
    assert {op_id(view, "kernel"), op_id(view, "kernel_other")} <= {*waited}


def test_nothing_waits_for_what_a_condition_may_leave_out() -> None:
    def conditional() -> Any:
        x = tf.compat.v1.placeholder(tf.float32, (8, 8), name="x")
        training = tf.compat.v1.placeholder(tf.bool, (), name="training")
        before = tf.exp(x, name="before")
        chosen = tf.compat.v1.cond(training, lambda: tf.tanh(before, name="in_branch"), lambda: before * 2)
        after = tf.sin(chosen, name="after")
        (slope,) = tf.compat.v1.gradients(after, [before], name="grads")
        return tf.exp(slope, name="end")

    tf.compat.v1.disable_control_flow_v2()
    try:
        _, view = build(conditional)
    finally:
        tf.compat.v1.enable_control_flow_v2()
    ops = {op.name.rpartition("/")[2]: op for op in view.graph.ops}
    assert ops["in_branch"].conditional and ops["TanhGrad"].conditional
    assert not any(ops[name].conditional for name in ("before", "Cos", "end"))
    floating = floating_ops(view.graph)
    assert ops["TanhGrad"].id in floating and ops["end"].id not in floating
    (switch, *_) = [op for op in view.graph.ops if op.type == "Switch" and len(op.inputs) == 2]
    assert [view.graph.tensors[out].alias_of for out in switch.outputs] == [switch.inputs[0]] * 2


def test_open_shapes_are_completed_in_a_copy() -> None:
    graph = tf.Graph()
    with graph.as_default():
        x = tf.compat.v1.placeholder(tf.float32, (None, 7), name="x")
        variable = tf.compat.v1.get_variable("w", (7, 5), use_resource=True)
        y = tf.matmul(x, variable, name="y")
        table = tf.gather(variable, tf.zeros([tf.shape(x)[0]], tf.int32), name="rows")
        tf.concat([y, table], 1, name="both")
    shapes = complete_shapes(graph, ShapeHints(batch_size=32))
    assert shapes["x:0"] == (32, 7)
    assert shapes["y:0"] == (32, 5)
    assert shapes["both:0"][1] == 10
    assert graph.get_tensor_by_name("y:0").shape.as_list() == [None, 5]
    view = read_graph(graph, "CPU", shapes)
    assert view.graph.tensors[view.graph.ops[op_id(view, "y")].outputs[0]].nbytes == 32 * 5 * 4
    assert "y:0" in read_graph(graph, "CPU").unknown


def test_hints_prefer_the_call_over_the_batch_size() -> None:
    hints = ShapeHints(calls=((8, 3), (4, 9, 9)), batch_size=100)
    assert hints.pin((None, 3)) == (8, 3)
    assert hints.pin((None, None, 9)) == (4, 9, 9)
    assert hints.pin((None, 5)) == (100, 5)
    assert hints.pin((2, 5)) == (2, 5)
    assert ShapeHints().pin((None, 5)) == (None, 5)


def test_arguments_of_one_rank_take_the_shapes_of_the_call_in_turn() -> None:
    hints = ShapeHints(calls=((8, 3), (3, 5), (8, 5)))
    arguments = {"x": (None, None), "fixed": (3, 5), "y": (None, 5), "late": (None, 3)}
    assert hints.pin_all(arguments) == {"x": (8, 3), "fixed": (3, 5), "y": (8, 5), "late": (8, 3)}
    graph = tf.Graph()
    with graph.as_default():
        x = tf.compat.v1.placeholder(tf.float32, (None, None), name="x")
        y = tf.compat.v1.placeholder(tf.float32, (None, None), name="y")
        tf.matmul(x, y, name="product")
    assert complete_shapes(graph, ShapeHints(calls=((8, 3), (3, 5))))["product:0"] == (8, 5)
    with pytest.raises(UnreadableError, match="cannot be completed from those of the call .* LMS_BATCH_SIZE"):
        complete_shapes(graph, ShapeHints(calls=((8, 3), (8, 3))))


def test_a_while_loop_of_compat_v1_is_refused_with_the_remedy() -> None:
    from lms.errors import LMSError

    graph = tf.Graph()
    with graph.as_default():
        enabled = tf.compat.v1.control_flow_v2_enabled()
        tf.compat.v1.disable_control_flow_v2()
        try:
            tf.compat.v1.while_loop(lambda i: i < 3, lambda i: i + 1, [tf.constant(0)])
        finally:
            if enabled:
                tf.compat.v1.enable_control_flow_v2()
    with pytest.raises(LMSError, match="enable_control_flow_v2"):
        read_graph(graph, "CPU")


def test_the_gradient_of_an_edited_graph_is_that_of_the_unedited() -> None:
    graph, view = build(chain)
    rewrite(graph, view, plan_of(view, (swap_a(view),)), NumpyTransport())
    value = np.random.RandomState(0).rand(64, 64).astype("f")
    with graph.as_default(), tf.compat.v1.Session() as session:
        x, loss = graph.get_tensor_by_name("x:0"), graph.get_tensor_by_name("loss:0")
        seen = session.run(tf.gradients(loss, x)[0], {x: value})
    a, slope = np.tanh(value), 1 - np.tanh(value) ** 2
    b = np.exp(a)
    c = np.log1p(np.exp(b))
    np.testing.assert_allclose(seen, slope * (c + a * b / (1 + np.exp(-b))), rtol=1e-4)


def test_what_a_user_names_gradient_is_no_backward_pass() -> None:
    assert not is_backward("gradient_clipping/norm", "Square")
    assert not is_backward("model/stop", "StopGradient")
    assert is_backward("train/gradients_1/mul", "Mul")
    assert is_backward("gradient_tape/model/mul", "Mul")
    assert is_backward("bn", "FusedBatchNormGradV3")
    assert is_backward("conv", "Conv3DBackpropFilterV2")
    assert is_backward("gradient_tape/conv/Conv3DBackpropInputV2", "Conv3DBackpropInputV2")


def test_a_transposed_convolution_is_no_backward_pass() -> None:
    graph = tf.Graph()
    with graph.as_default():
        tf.nn.conv3d_transpose(tf.zeros((1, 4, 4, 4, 3)), tf.zeros((2, 2, 2, 5, 3)), (1, 8, 8, 8, 5), 2)
    assert any("BackpropInput" in op.type for op in graph.get_operations())
    assert not has_backward_pass(graph.get_operations())


def test_no_op_is_kept_beside_one_that_runs_on_the_host_now() -> None:
    def joined() -> Any:
        parts = [tf.exp(tf.compat.v1.placeholder(tf.float32, (64, 64))) for _ in range(2)]
        both = tf.concat(parts, 0, name="both")
        with tf.compat.v1.colocate_with(both.op), tf.compat.v1.colocate_with(parts[0].op):
            return tf.tanh(both, name="beside")

    graph, view = build(joined)
    relocation = read_from_host(view.graph, [op_id(view, "both")], 1, direct=False)
    moved = relocated(view, relocation)
    rewrite(graph, view, plan_of(moved, ()), NumpyTransport(), relocation)
    beside = graph.get_operation_by_name("beside").get_attr("_class")
    assert "CPU" in graph.get_operation_by_name("both").device
    assert beside and b"loc:@both" not in beside
