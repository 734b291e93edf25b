"""A step on several threads, or on a GPU: what runs side by side holds memory side by side."""

from dataclasses import replace
from random import Random

import pytest

from lms.config import LMSConfig
from lms.ir.assignments import in_place
from lms.ir.graph import Graph, GraphBuilder, Use
from lms.ir.liveness import Buffers
from lms.ir.swap_plan import Filler, SerialEdge, Swap, SwapIn, SwapPlan
from lms.simulate.allocation_trace import Filled
from lms.simulate.cost_model import Costs
from lms.simulate.executor import RUNS, Execution, Tasks, likely_peak, peaks_by_chance
from lms.swaps.swap_planner import plan

K = 4096
MIB = 1 << 20
ROOM = 1 << 30
SLOPE = 256 * K
COSTS = Costs(flops_per_s=1e9, device_bytes_per_s=1e9, launch_s=1e-6, overlaps=False)
GPU = replace(COSTS, overlaps=True, threads=1)


def backward(layers: int = 4) -> Graph:
    """Gradients of a chain of layers: each has a filter's gradient that nothing waits for."""
    build = GraphBuilder()
    (slope,) = build.add("begin", "Fill", outputs=[SLOPE])
    for layer in range(layers):
        build.add(f"filter_{layer}", "Conv2DBackpropFilter", inputs=[slope], outputs=[K], flops=1e8)
        (slope,) = build.add(
            f"image_{layer}", "Conv2DBackpropInput", inputs=[slope], outputs=[SLOPE], flops=1e7
        )
    return build.build(kept=[slope])


def unplanned(graph: Graph) -> SwapPlan:
    made = plan(graph, LMSConfig(policy="budget", budget_bytes=ROOM))
    assert made.is_empty
    return made


def peaks(
    graph: Graph, threads: int, made: SwapPlan | None = None, room: int = ROOM, costs: Costs = COSTS
) -> tuple[int | None, ...]:
    costs = replace(costs, threads=threads)
    return tuple(peaks_by_chance(Buffers.of(graph), made or unplanned(graph), costs, (room,)))


def run(graph: Graph, made: SwapPlan, threads: int, costs: Costs = COSTS, seed: int = 0) -> Execution:
    chance = Random(seed)  # noqa: S311 - the same each time
    costs = replace(costs, threads=threads)
    return Execution(Tasks(Buffers.of(graph), made, costs), chance)


def test_what_nothing_waits_for_holds_its_operands_on_a_second_thread() -> None:
    graph = backward()
    in_order = Buffers.of(graph).timeline(tuple(range(len(graph.ops))), ())
    assert in_order.peak_bytes < 3 * SLOPE
    found = peaks(graph, 2)
    assert len(found) == RUNS
    assert all(peak and peak >= 3 * SLOPE for peak in found)


def test_the_likely_peak_is_that_of_most_runs_on_several_threads() -> None:
    graph = backward()
    buffers, made = Buffers.of(graph), unplanned(graph)
    two = replace(COSTS, threads=2)
    likely = likely_peak(buffers, made, two, ROOM)
    assert likely == sorted(peak or 0 for peak in peaks(graph, 2))[RUNS // 2 - 1]
    assert likely_peak(buffers, made, replace(COSTS, threads=1), ROOM) is None
    assert likely_peak(buffers, made, two, SLOPE) == SLOPE, "what does not fit takes all"


def test_one_thread_runs_one_op_at_a_time_and_two_run_two() -> None:
    graph = backward()
    for threads in (1, 2):
        made = run(graph, unplanned(graph), threads)
        spans = list(zip(made.begins, made.ends, strict=True))
        most = max(sum(begin <= at < end for begin, end in spans) for at, _ in spans)
        assert most == threads
        for op, before in enumerate(graph.predecessors):
            assert all(made.ends[earlier] < made.begins[op] for earlier in before)


def test_the_edges_of_a_plan_hold() -> None:
    graph = backward()
    filters = [op.id for op in graph.ops if op.type == "Conv2DBackpropFilter"]
    images = [op.id for op in graph.ops if op.type == "Conv2DBackpropInput"]
    edges = tuple(SerialEdge(first, then) for first, then in zip(filters, images, strict=True))
    made = SwapPlan("budget", tuple(range(len(graph.ops))), (), edges, (), 0, 0, 0, None)
    assert all(peak and peak < 3 * SLOPE for peak in peaks(graph, 2, made))


@pytest.mark.parametrize(("link", "is_taken"), [(1e12, True), (1e5, False)])
def test_a_kernel_writes_over_a_swapped_tensor_whose_copy_is_done(link: float, is_taken: bool) -> None:
    """As the normalisation of a batch does with what a convolution has made."""
    build = GraphBuilder()
    (made,) = build.add("convolution", "Conv2D", outputs=[SLOPE], flops=1e7)
    (mean,) = build.add("mean", "Mean", inputs=[made], outputs=[K], flops=1e7)
    (scaled,) = build.add("scaled", "Mul", inputs=[made, mean], outputs=[SLOPE], in_place=[0])
    (loss,) = build.add("loss", "Mean", inputs=[scaled], outputs=[K])
    (end,) = build.add("gradient", "Mul", inputs=[made, loss], outputs=[SLOPE], in_place=[0])
    graph = build.build(kept=[end])
    back = SwapIn(3, (Use(4, 0),), ())
    swap = Swap(made, SLOPE, 0, (back,), (), None, at_once=True)
    plan = SwapPlan("budget", (0, 1, 2, 3, 4), (swap,), (), (), 0, 0, 0, None)
    costs = replace(COSTS, out_bytes_per_s=link, in_bytes_per_s=link)
    demand = run(graph, plan, 2, costs).demand(None)
    assert demand.handed_on == ({scaled: made, end: made} if is_taken else {end: made})
    stays = [stay for stay in demand.stays if stay.tensor == made]
    begin = next(stay.first for stay in demand.stays if stay.tensor == scaled)
    assert (stays[0].last == begin - 1) == is_taken


def test_a_swapped_tensor_leaves_when_its_copy_is_done_and_comes_back_behind_its_trigger() -> None:
    build = GraphBuilder()
    (kept,) = build.add("forward", "MatMul", outputs=[64 * K])
    (near,) = build.add("near", "Relu", inputs=[kept], outputs=[K], in_place=())
    (far,) = build.add("far", "MatMul", inputs=[near], outputs=[K])
    build.add("last", "MatMul", inputs=[far, kept], outputs=[K])
    graph = build.build()
    swap = Swap(kept, 64 * K, 1, (SwapIn(2, (Use(3, 1),)),), blocks=(2,))
    made = SwapPlan("budget", (0, 1, 2, 3), (swap,), (), (), 0, 0, 0, None)
    done = run(graph, made, 2)
    out, back = 4, 5
    assert done.ends[1] < done.begins[out] < done.ends[out] < done.begins[2]
    assert done.ends[2] < done.begins[back] < done.ends[back] < done.begins[3]
    first, second = (stay for stay in done.demand(None).stays if stay.tensor == kept)
    assert (first.first, first.last) == (done.begins[0], done.ends[out])
    assert (second.first, second.last) == (done.begins[back], done.ends[3])


@pytest.mark.parametrize("seed", range(5))
def test_a_gpu_goes_on_beside_a_copy_until_an_op_waits_for_it(seed: int) -> None:
    build = GraphBuilder()
    (kept,) = build.add("forward", "MatMul", outputs=[64 * K])
    (near,) = build.add("near", "Relu", inputs=[kept], outputs=[K], in_place=())
    (beside,) = build.add("beside", "MatMul", inputs=[near], outputs=[K])
    (far,) = build.add("far", "MatMul", inputs=[beside], outputs=[K])
    build.add("last", "MatMul", inputs=[far, kept], outputs=[K])
    graph = build.build()
    swap = Swap(kept, 64 * K, 1, (SwapIn(3, (Use(4, 1),)),), blocks=(3,))
    made = SwapPlan("budget", (0, 1, 2, 3, 4), (swap,), (), (), 0, 0, 0, None)
    slow_link = replace(GPU, out_bytes_per_s=1e6)
    done = run(graph, made, 1, slow_link, seed)
    out, back = 5, 6
    assert done.ends[1] < done.begins[out] < done.begins[2] < done.ends[out] < done.begins[3]
    assert done.ends[3] < done.begins[back] < done.ends[back] < done.begins[4]


def test_a_gpu_launches_what_is_ready_whatever_the_order_of_the_plan() -> None:
    build = GraphBuilder()
    ends = []
    for chain in range(3):
        (first,) = build.add(f"first_{chain}", "MatMul", outputs=[64 * K])
        ends += build.add(f"last_{chain}", "MatMul", inputs=[first], outputs=[K])
    graph = build.build(kept=ends)
    made = SwapPlan("budget", tuple(range(6)), (), (), (), 0, 0, 0, None)
    edges = (SerialEdge(1, 2), SerialEdge(3, 4))
    assert all(peaks(graph, 1, replace(made, serial_edges=edges), 160 * K, GPU))
    assert peaks(graph, 1, made, 160 * K, GPU) == (None,) * RUNS


def test_the_next_batch_of_a_gpu_lies_on_the_host() -> None:
    build = GraphBuilder()
    (batch,) = build.add("next", "IteratorGetNext", outputs=[64 * K])
    graph = build.build(kept=[batch])
    found = [len(run(graph, unplanned(graph), 1, costs).demand(None).stays) for costs in (COSTS, GPU)]
    assert found == [2, 1]


def test_an_op_writes_over_what_nobody_else_reads_any_more() -> None:
    build = GraphBuilder()
    (image,) = build.add("image", "MatMul", outputs=[64 * K])
    (over,) = build.add("over", "Relu", inputs=[image], outputs=[64 * K])
    graph = build.build(kept=[over])
    assert run(graph, unplanned(graph), 2).demand(None).handed_on == {over: image}
    build = GraphBuilder()
    (image,) = build.add("image", "MatMul", outputs=[64 * K])
    build.add("other", "MatMul", inputs=[image], outputs=[K], flops=1e9)
    (over,) = build.add("over", "Relu", inputs=[image], outputs=[64 * K])
    graph = build.build(kept=[over])
    assert not run(graph, unplanned(graph), 2).demand(None).handed_on


def test_the_next_batch_lies_beside_the_step() -> None:
    build = GraphBuilder()
    (batch,) = build.add("next", "IteratorGetNext", outputs=[64 * K])
    (last,) = build.add("layer", "MatMul", inputs=[batch], outputs=[64 * K])
    graph = build.build(kept=[last])
    stays = run(graph, unplanned(graph), 1).demand(None).stays
    assert sum(stay.nbytes == 64 * K for stay in stays) == 3


def test_a_run_that_finds_no_room_has_no_peak() -> None:
    graph = backward()
    assert peaks(graph, 2, room=2 * SLOPE) == (None,) * RUNS


@pytest.mark.parametrize("threads", [1, 2, 8])
def test_the_same_step_has_the_same_peaks(threads: int) -> None:
    assert peaks(backward(), threads) == peaks(backward(), threads)


def test_fillers_are_there_while_their_op_runs_or_until_a_copy_is_read() -> None:
    build = GraphBuilder()
    (x,) = build.add("x", "Conv2D", outputs=[SLOPE])
    (y,) = build.add("y", "Conv2D", inputs=[x], outputs=[K])
    (z,) = build.add("z", "Conv2D", inputs=[y], outputs=[K])
    build.add("last", "Conv2D", inputs=[x, z], outputs=[K])
    swap = Swap(x, SLOPE, 0, (SwapIn(1, (Use(3, 0),)),))
    fillers = (Filler(1, False, (K,), 256, 2, 1, 2), Filler(1, True, (SLOPE,), 256, 2, 2, 3))
    order = (0, 1, 2, 3)
    found = run(build.build(), SwapPlan("budget", order, (swap,), (), (), 0, 0, 0, None, fillers=fillers), 2)
    back = found.begins[5]
    assert found.demand(None).fillers == {
        found.begins[1]: Filled((K,), 256, found.ends[1]),
        back: Filled((SLOPE,), 256, found.begins[3] - 1),
    }


@pytest.mark.parametrize(("case", "moves"), [("plain", False), ("kept", True), ("beside", True)])
def test_an_assignment_leaves_its_variable_in_its_place_where_nobody_holds_it_then(
    case: str, moves: bool
) -> None:
    """A value that is fetched is held to the end; a reader on the other thread while it runs."""
    build = GraphBuilder()
    (handle,) = build.add("momentum", "Placeholder", outputs=[0])
    (old,) = build.add("read", "ReadVariableOp", inputs=[handle], outputs=[32 * MIB])
    (new,) = build.add("new", "MatMul", inputs=[old], outputs=[32 * MIB], flops=1.0)
    if case == "beside":
        build.add("slow", "MatMul", inputs=[old], outputs=[MIB], flops=1e15)
    build.add("keep", "AssignVariableOp", inputs=[handle, new], assigns_in_place=True)
    graph = build.build([old] if case == "kept" else [])
    order = tuple(range(len(graph.ops)))
    made = SwapPlan("budget", order, (), (SerialEdge(0, 1),), (), 0, 0, 0, None)
    assert (order[-1] in in_place(Buffers.of(graph), order)) == (case != "kept")
    assert bool(run(graph, made, 2).demand(None).updates) == moves
