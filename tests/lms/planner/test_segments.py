"""Segments: which ops are put together, and what a plan of them counts."""

import pytest
from hypothesis import given
from test_recompute_properties import MODEST, steps

from lms.config import LMSConfig
from lms.ir.graph import Graph, GraphBuilder
from lms.ir.liveness import Buffers
from lms.planner.segments import SEGMENT, plan_segments, segmented

KIB = 1024


def chain(*kinds: str) -> Graph:
    """Ops one behind the other, the last one's result kept."""
    build = GraphBuilder()
    (last,) = build.add("x", "IteratorGetNext", outputs=[KIB])
    for number, kind in enumerate(kinds):
        (last,) = build.add(f"{kind}_{number}", kind, inputs=[last], outputs=[KIB])
    return build.build([last])


def put(graph: Graph, compilable: set[int], most_bytes: int | None = None) -> list[tuple[int, ...]]:
    made = segmented(Buffers.of(graph), range(len(graph.ops)), compilable, most_bytes)
    return [made.ops[op] for op in made.segments]


def test_neighbours_are_put_together() -> None:
    assert put(chain("Exp", "Tanh", "MatMul"), {1, 2, 3}) == [(1, 2, 3)]


def test_no_segment_has_a_left_out_op_between_its_own() -> None:
    assert put(chain("Exp", "Tanh", "Where", "Exp", "Tanh"), {1, 2, 4, 5}) == [(1, 2), (4, 5)]


def test_one_op_is_no_segment_and_a_view_computes_nothing() -> None:
    assert put(chain("Exp", "Reshape", "Where"), {1, 2}) == []


def test_views_at_the_border_stay_views() -> None:
    assert put(chain("Reshape", "Exp", "Tanh", "Reshape"), {1, 2, 3, 4}) == [(2, 3)]


def test_ops_without_an_edge_between_them_are_apart() -> None:
    build = GraphBuilder()
    (x,) = build.add("x", "IteratorGetNext", outputs=[KIB])
    for name in ("a", "b"):
        (y,) = build.add(name, "Exp", inputs=[x], outputs=[KIB])
        build.add(name + "2", "Tanh", inputs=[y], outputs=[KIB])
    assert put(build.build(), {1, 2, 3, 4}) == [(1, 2), (3, 4)]


@pytest.mark.parametrize(("most", "count"), [(None, 1), (2 * KIB, 3), (KIB, 0)])
def test_a_segment_keeps_within_its_bytes(most: int | None, count: int) -> None:
    build = GraphBuilder()
    (x,) = build.add("x", "IteratorGetNext", outputs=[KIB])
    made = []
    for number in range(6):
        (x,) = build.add(f"op{number}", "Exp", inputs=[x], outputs=[KIB])
        made += [x] if number % 2 else []
    graph = build.build(made)
    assert len(put(graph, set(range(1, 7)), most)) == count


def test_what_one_matrix_product_makes_for_another_is_scratch_memory() -> None:
    graph = chain("MatMul", "MatMul", "MatMul")
    made = segmented(Buffers.of(graph), range(4), {1, 2, 3}, None)
    (segment,) = (made.graph.ops[op] for op in made.segments)
    assert segment.type == SEGMENT and segment.workspace_bytes == 2 * KIB
    assert [made.graph.tensors[tensor].nbytes for tensor in segment.outputs] == [KIB]


@MODEST
@given(graph=steps())
def test_every_op_is_there_once_behind_what_it_waits_for(graph: Graph) -> None:
    may = {op.id for op in graph.ops if op.type in ("MatMul", "Relu", "AddV2", "Reshape")}
    made = segmented(Buffers.of(graph), range(len(graph.ops)), may, None)
    assert sorted(op for ops in made.ops for op in ops) == list(range(len(graph.ops)))
    for op in made.graph.ops:
        assert all(before < op.id for before in made.graph.predecessors[op.id])
    for op in made.segments:
        assert may.issuperset(made.ops[op])
    read = [graph.ops[use.op].inputs[use.slot] for uses in made.uses for use in uses]
    assert [made.tensors[tensor] for op in made.graph.ops for tensor in op.inputs] == read


def test_a_plan_swaps_between_segments_alone() -> None:
    build = GraphBuilder()
    (x,) = build.add("x", "IteratorGetNext", outputs=[KIB])
    kept = [x]
    for layer in range(8):
        (y,) = build.add(f"dense{layer}", "MatMul", inputs=[kept[-1]], outputs=[256 * KIB])
        (z,) = build.add(f"act{layer}", "Tanh", inputs=[y], outputs=[256 * KIB])
        kept.append(z)
    slope = kept[-1]
    for layer in reversed(range(8)):
        (slope,) = build.add(
            f"gradients/act{layer}", "TanhGrad", inputs=[kept[layer + 1], slope], outputs=[256 * KIB]
        )
        (slope,) = build.add(f"gradients/dense{layer}", "MatMul", inputs=[slope], outputs=[256 * KIB])
    graph = build.build([slope])
    config = LMSConfig(policy="all", min_tensor_bytes=KIB)
    found = plan_segments(graph, range(1, len(graph.ops)), config, "CPU", None)
    assert found.segmentation is not None and found.segmentation.segments
    assert found.plan.swaps and found.plan.peak_bytes < found.plan.peak_before_bytes / 2
