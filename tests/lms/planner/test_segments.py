"""Segments: which ops are put together, and what a plan of them counts."""

from dataclasses import replace

import pytest
from hypothesis import given
from test_recompute_properties import MODEST, steps

from lms.config import LMSConfig
from lms.ir.graph import Graph, GraphBuilder
from lms.ir.liveness import Buffers
from lms.planner import segments
from lms.planner.hybrid import decide
from lms.planner.segments import CALL_S, OWN_ORDER, SEGMENT, plan_segments, segmented, updating_ops
from lms.simulate.cost_model import costs_of
from lms.swaps.case import Case

BLOCK = 64 * 1024  # with less a segment is not worth its call


def chain(*kinds: str) -> Graph:
    """Ops one behind the other, the last one's result kept."""
    build = GraphBuilder()
    (last,) = build.add("x", "IteratorGetNext", outputs=[BLOCK])
    for number, kind in enumerate(kinds):
        (last,) = build.add(f"{kind}_{number}", kind, inputs=[last], outputs=[BLOCK])
    return build.build([last])


def put(graph: Graph, compilable: set[int], most_bytes: int | None = None) -> list[tuple[int, ...]]:
    made = segmented(Buffers.of(graph), range(len(graph.ops)), compilable, most_bytes, "CPU", costs_of("CPU"))
    return [made.ops[op] for op in made.segments]


def test_neighbours_are_put_together() -> None:
    assert put(chain("Exp", "Tanh", "MatMul"), {1, 2, 3}) == [(1, 2, 3)]


def test_no_segment_has_a_left_out_op_between_its_own() -> None:
    assert put(chain("Exp", "Tanh", "Where", "Exp", "Tanh"), {1, 2, 4, 5}) == [(1, 2), (4, 5)]


def test_one_op_is_no_segment_and_a_view_computes_nothing() -> None:
    assert put(chain("Exp", "Reshape", "Where"), {1, 2}) == []


def test_views_at_the_border_stay_views() -> None:
    assert put(chain("Reshape", "Exp", "Tanh", "Reshape"), {1, 2, 3, 4}) == [(2, 3)]


def test_what_makes_little_is_no_segment() -> None:
    build = GraphBuilder()
    (last,) = build.add("x", "IteratorGetNext", outputs=[4])
    for number in range(9):
        (last,) = build.add(f"rate_{number}", "Sqrt", inputs=[last], outputs=[4])
    assert put(build.build([last]), {*range(1, 10)}) == []


def test_updates_do_not_cut_the_backward_pass() -> None:
    build = GraphBuilder()
    (slope,) = build.add("x", "IteratorGetNext", outputs=[BLOCK])
    for layer in range(3):
        (grown,) = build.add(f"gradients/weight{layer}", "MatMul", inputs=[slope], outputs=[BLOCK])
        (slope,) = build.add(f"gradients/rows{layer}", "MatMul", inputs=[slope], outputs=[BLOCK])
        (moved,) = build.add(f"moved{layer}", "Mul", inputs=[grown], outputs=[BLOCK])
        (kept,) = build.add(f"moment{layer}", "AssignAddVariableOp", inputs=[moved], outputs=[4])
        (step,) = build.add(f"step{layer}", "Sqrt", inputs=[kept], outputs=[BLOCK])
        build.add(f"update{layer}", "AssignSubVariableOp", inputs=[step])
    graph = build.build([slope])
    updating = updating_ops(graph)
    assert {graph.ops[op].name[:-1] for op in updating} == {"moved", "step"}
    may = {op.id for op in graph.ops if op.type in ("MatMul", "Mul", "Sqrt")}
    assert len(put(graph, may)) > 1
    assert [len(ops) for ops in put(graph, may - updating)] == [5]


def test_a_metric_does_not_cut_the_backward_pass() -> None:
    build = GraphBuilder()
    (x,) = build.add("x", "IteratorGetNext", outputs=[BLOCK])
    (loss,) = build.add("loss", "Mean", inputs=[x], outputs=[BLOCK])
    (total,) = build.add("total", "AssignAddVariableOp", inputs=[loss], outputs=[4])
    (shown,) = build.add("shown", "DivNoNan", inputs=[total], outputs=[4])
    (slope,) = build.add("slope", "Exp", inputs=[loss], outputs=[BLOCK])
    assert put(build.build([shown, slope]), {1, 3, 4}) == [(1, 4)]


def test_ops_without_an_edge_between_them_are_apart() -> None:
    build = GraphBuilder()
    (x,) = build.add("x", "IteratorGetNext", outputs=[BLOCK])
    for name in ("a", "b"):
        (y,) = build.add(name, "Exp", inputs=[x], outputs=[BLOCK])
        build.add(name + "2", "Tanh", inputs=[y], outputs=[BLOCK])
    assert put(build.build(), {1, 2, 3, 4}) == [(1, 2), (3, 4)]


@pytest.mark.parametrize(("most", "count"), [(None, 1), (2 * BLOCK, 3), (BLOCK, 0)])
def test_a_segment_keeps_within_its_bytes(most: int | None, count: int) -> None:
    build = GraphBuilder()
    (x,) = build.add("x", "IteratorGetNext", outputs=[BLOCK])
    made = []
    for number in range(6):
        (x,) = build.add(f"op{number}", "Exp", inputs=[x], outputs=[BLOCK])
        made += [x] if number % 2 else []
    graph = build.build(made)
    assert len(put(graph, set(range(1, 7)), most)) == count


def test_what_one_matrix_product_makes_for_another_is_scratch_memory() -> None:
    graph = chain("MatMul", "MatMul", "MatMul")
    made = segmented(Buffers.of(graph), range(4), {1, 2, 3}, None, "CPU", costs_of("CPU"))
    (segment,) = (made.graph.ops[op] for op in made.segments)
    assert segment.type == SEGMENT and segment.workspace_bytes == OWN_ORDER * 2 * BLOCK
    assert [made.graph.tensors[tensor].nbytes for tensor in segment.outputs] == [BLOCK]


@pytest.mark.parametrize(("device_type", "written"), [("CPU", BLOCK), ("GPU", 0)])
def test_what_a_sum_reads_is_scratch_memory_on_a_cpu(device_type: str, written: int) -> None:
    build = GraphBuilder()
    (last,) = build.add("x", "IteratorGetNext", outputs=[BLOCK])
    (last,) = build.add("squares", "Square", inputs=[last], outputs=[BLOCK], in_place=[0])
    (total,) = build.add("total", "Mean", inputs=[last], outputs=[4])
    graph = build.build([total])
    made = segmented(Buffers.of(graph), range(3), {1, 2}, None, device_type, costs_of(device_type))
    (segment,) = (made.graph.ops[op] for op in made.segments)
    assert segment.workspace_bytes == written


@MODEST
@given(graph=steps())
def test_every_op_is_there_once_behind_what_it_waits_for(graph: Graph) -> None:
    may = {op.id for op in graph.ops if op.type in ("MatMul", "Relu", "AddV2", "Reshape")}
    made = segmented(Buffers.of(graph), range(len(graph.ops)), may, None, "CPU", costs_of("CPU"))
    assert sorted(op for ops in made.ops for op in ops) == list(range(len(graph.ops)))
    for op in made.graph.ops:
        assert all(before < op.id for before in made.graph.predecessors[op.id])
    for op in made.segments:
        assert may.issuperset(made.ops[op])
    read = [graph.ops[use.op].inputs[use.slot] for uses in made.uses for use in uses]
    assert [made.tensors[tensor] for op in made.graph.ops for tensor in op.inputs] == read


def test_an_op_and_its_repeat_are_in_different_segments() -> None:
    graph, costs = chain("Exp", "Tanh", "Exp", "Tanh", "Exp", "Tanh"), costs_of("CPU")
    made = segmented(Buffers.of(graph), range(7), set(range(1, 7)), None, "CPU", costs, {4: 2})
    assert [made.ops[op] for op in made.segments] == [(1, 2, 3), (4, 5, 6)]


def test_what_is_computed_where_it_is_read_takes_no_time() -> None:
    graph, costs = chain("MatMul", "Exp", "Tanh", "MatMul", "Exp"), costs_of("CPU")
    made = segmented(Buffers.of(graph), range(6), set(range(1, 6)), None, "CPU", costs)
    (segment,) = (made.graph.ops[op] for op in made.segments)
    seconds = costs.op_seconds(graph)
    kernels = [
        1,
        3,
        4,
        5,
    ]  # but the exponential before the other elementwise op; XLA writes what a product reads
    assert segment.flops == pytest.approx(costs.flops_per_s * (CALL_S + sum(seconds[op] for op in kernels)))


@MODEST
@given(graph=steps())
def test_segments_of_a_step_with_repeated_ops_keep_them_apart(graph: Graph) -> None:
    config, costs = LMSConfig(min_tensor_bytes=1, recompute="only", margin=0.0), costs_of("GPU")
    budget = max(1, Case.of(graph, config, costs).peak_before_bytes * 3 // 4)
    config = replace(config, policy="budget", budget_bytes=budget)
    plain = decide(graph, config, "GPU", None, costs)
    may = {op.id for op in graph.ops if op.type in ("MatMul", "Relu", "AddV2", "Reshape")}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(segments, "FEWEST_BYTES", 1)
        found = plan_segments(graph, may, config, "GPU", None, costs, plain)
    assert found.recomputation is plain.recomputation
    if found.segmentation is None:
        return
    assert found.plan.feasible == (found.plan.peak_bytes <= budget)
    if (made := found.recomputation) is not None:
        assert found.segmentation.before is made.graph and found.plan.recomputed == plain.plan.recomputed
        for op in found.segmentation.segments:
            sources = [made.ops[one] for one in found.segmentation.ops[op]]
            assert len({*sources}) == len(sources)


def test_a_plan_swaps_between_segments_alone() -> None:
    build = GraphBuilder()
    (x,) = build.add("x", "IteratorGetNext", outputs=[BLOCK])
    kept = [x]
    for layer in range(8):
        (y,) = build.add(f"dense{layer}", "MatMul", inputs=[kept[-1]], outputs=[256 * BLOCK])
        (z,) = build.add(f"act{layer}", "Tanh", inputs=[y], outputs=[256 * BLOCK])
        kept.append(z)
    slope = kept[-1]
    for layer in reversed(range(8)):
        (slope,) = build.add(
            f"gradients/act{layer}", "TanhGrad", inputs=[kept[layer + 1], slope], outputs=[256 * BLOCK]
        )
        (slope,) = build.add(f"gradients/dense{layer}", "MatMul", inputs=[slope], outputs=[256 * BLOCK])
    graph = build.build([slope])
    config = LMSConfig(policy="all", min_tensor_bytes=BLOCK)
    found = plan_segments(graph, range(1, len(graph.ops)), config, "CPU", None)
    assert found.segmentation is not None and found.segmentation.segments
    assert found.plan.swaps and found.plan.peak_bytes < found.plan.peak_before_bytes / 2
