"""When variables that stream come and leave: the memory that is planned bounds that of every legal run."""

from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lms.config import LMSConfig
from lms.ir.graph import Graph, GraphBuilder
from lms.ir.liveness import Buffers, positions
from lms.ir.op_traits import STREAM_ENTER, STREAM_IN, STREAM_LAST, STREAM_LEAVE, STREAM_OUT
from lms.ir.swap_plan import SerialEdge, SwapPlan
from lms.planner import hybrid
from lms.rewriter.writer import require_forward
from lms.simulate.cost_model import Costs
from lms.simulate.step_time import StreamedCopies, clock
from lms.simulate.streams import closest
from lms.swaps.case import Case
from lms.swaps.swap_planner import plan_case

KIB = 1024
COSTS = Costs(1e9, 1e9, 1e-6, out_bytes_per_s=1e6, in_bytes_per_s=1e6, copy_latency_s=0.0)
"""A millisecond for each kilobyte that is copied."""


def step(sizes: Sequence[int], activation: int = 4 * KIB, *, collective: bool = False) -> Graph:
    """A chain of layers, each with a variable: read forward and backward, updated behind its gradient."""
    build = GraphBuilder()
    (x,) = build.add("x", "IteratorGetNext", outputs=[activation])
    activations, values = [x], []
    for number, size in enumerate(sizes):
        (handle,) = build.add(f"handle{number}", "VarHandleOp", outputs=[8])
        (value,) = build.add(f"value{number}", "ReadVariableOp", inputs=[handle], outputs=[size])
        values.append((handle, value))
        (weight,) = build.add(f"forward{number}", STREAM_IN, inputs=[value], outputs=[size])
        (x,) = build.add(f"y{number}", "MatMul", inputs=[x, weight], outputs=[activation], flops=4e6)
        activations.append(x)
    leaves = []
    for number, size in reversed([*enumerate(sizes)]):
        handle, value = values[number]
        (weight,) = build.add(f"backward{number}", STREAM_IN, inputs=[value], outputs=[size])
        before, inputs = activations[number], [x, activations[number]]
        (gradient,) = build.add(f"gradient{number}", "MatMul", inputs=inputs, outputs=[size], flops=4e6)
        (x,) = build.add(
            f"slope{number}", "MatMul", inputs=[x, weight, before], outputs=[activation], flops=4e6
        )
        if collective:
            (gradient,) = build.add(f"reduce{number}", "HorovodAllreduce", inputs=[gradient], outputs=[size])
        (come,) = build.add(f"come{number}", STREAM_IN, inputs=[value], outputs=[size])
        gate = build._tensors[gradient].op
        (held,) = build.add(
            f"enter{number}", STREAM_ENTER, inputs=[handle, come], outputs=[0], controls=[gate], aliases=(1,)
        )
        build.add(f"update{number}", "ResourceApplyGradientDescent", inputs=[handle, gradient, held])
        update = len(build._ops) - 1
        (last,) = build.add(
            f"last{number}",
            STREAM_LAST,
            inputs=[handle, held],
            outputs=[size],
            controls=[update],
            aliases=(1,),
        )
        (out,) = build.add(f"out{number}", STREAM_OUT, inputs=[last], outputs=[size], outside=True)
        build.add(f"leave{number}", STREAM_LEAVE, inputs=[handle, out, held])
        leaves.append(len(build._ops) - 1)
    build.add("end", "NoOp", controls=leaves, chainable=False)
    return build.build()


def planned(graph: Graph, budget: int | None, policy: str = "auto", costs: Costs = COSTS) -> SwapPlan:
    config = LMSConfig(policy=policy, min_tensor_bytes=1, margin=0.0, recompute="off")
    return plan_case(Case.of(graph, config, costs), config, budget)


def seconds_of(graph: Graph, made: SwapPlan, costs: Costs = COSTS) -> float:
    streamed = StreamedCopies.of(graph, made.serial_edges)
    return clock(made.order, made.swaps, costs, costs.op_seconds(graph), streamed).now_s


def least_peak(graph: Graph) -> int:
    return planned(graph, 1).peak_bytes


def any_order(graph: Graph, edges: Sequence[SerialEdge], chance: Random) -> tuple[int, ...]:
    """An order of the ops that the graph and the edges allow, at random."""
    before = [set(ops) for ops in graph.predecessors]
    for edge in edges:
        before[edge.after].add(edge.before)
    left, order = set(range(len(before))), []
    eager = chance.random()
    while left:
        ready = sorted(op for op in left if before[op].isdisjoint(left))
        copies = [op for op in ready if graph.ops[op].type in (STREAM_LEAVE, STREAM_OUT)]
        others = [op for op in ready if op not in copies]
        taken = chance.choice(others if others and (not copies or chance.random() < eager) else copies)
        order.append(taken)
        left.remove(taken)
    return tuple(order)


SIZES = st.lists(st.sampled_from([1, 2, 3, 4, 8, 16]).map(lambda n: n * KIB), min_size=2, max_size=7)


@settings(deadline=None)
@given(SIZES, st.floats(1.0, 3.0), st.integers(0, 2**32), st.sampled_from([1e5, 1e6, 1e8]))
def test_no_legal_run_needs_more_than_is_planned(
    sizes: list[int], room: float, seed: int, link: float
) -> None:
    graph = step(sizes)
    made = planned(graph, int(room * least_peak(graph)), costs=COSTS.with_link(link))
    require_forward(graph, made)
    assume(not made.swaps)  # their copies are no ops of the graph
    buffers, chance = Buffers.of(graph), Random(seed)  # noqa: S311
    for _ in range(5):
        order = any_order(graph, made.serial_edges, chance)
        assert buffers.timeline(order, ()).peak_bytes <= made.peak_bytes


def fused(layers: int, variables: int, size: int, *, synced: bool, chance: Random) -> Graph:
    """Layers whose gradients other ranks add to; an op updates all variables of one, the value and its state.

    If ``synced``, ranks exchange statistics in the forward pass, too. The updates come in any order.
    """
    build = GraphBuilder()
    (x,) = build.add("x", "IteratorGetNext", outputs=[4 * KIB])
    reads: list[list[tuple[int, int]]] = []
    activations = [x]
    for layer in range(layers):
        reads.append([])
        for number in range(variables):
            (handle,) = build.add(f"handle{layer}_{number}", "VarHandleOp", outputs=[8])
            (value,) = build.add(f"value{layer}_{number}", "ReadVariableOp", inputs=[handle], outputs=[size])
            reads[-1].append((handle, value))
        (weight,) = build.add(f"forward{layer}", STREAM_IN, inputs=[value], outputs=[size])
        (x,) = build.add(f"y{layer}", "MatMul", inputs=[x, weight], outputs=[4 * KIB], flops=4e6)
        if synced:
            (mean,) = build.add(f"sync{layer}", "HorovodAllreduce", inputs=[x], outputs=[256])
            (x,) = build.add(f"norm{layer}", "Mul", inputs=[x, mean], outputs=[4 * KIB])
        activations.append(x)
    gradients = []
    for layer in reversed(range(layers)):
        inputs = [x, activations[layer]]
        (slope,) = build.add(f"gradient{layer}", "MatMul", inputs=inputs, outputs=[size], flops=4e6)
        (x,) = build.add(f"slope{layer}", "MatMul", inputs=inputs, outputs=[4 * KIB], flops=4e6)
        (slope,) = build.add(f"reduce{layer}", "HorovodAllreduce", inputs=[slope], outputs=[size])
        gradients.append((layer, slope, len(build._ops) - 1))
    leaves = []
    for layer, slope, gate in chance.sample(gradients, len(gradients)):
        held = []
        for number, (handle, value) in enumerate(reads[layer]):
            (come,) = build.add(f"come{layer}_{number}", STREAM_IN, inputs=[value], outputs=[size])
            held += build.add(
                f"enter{layer}_{number}",
                STREAM_ENTER,
                inputs=[handle, come],
                outputs=[0],
                controls=[gate],
                aliases=(1,),
            )
        handles = [handle for handle, _ in reads[layer]]
        build.add(f"update{layer}", "ResourceApplyAdam", inputs=[*handles, slope, *held])
        update = len(build._ops) - 1
        for number, handle in enumerate(handles):
            (last,) = build.add(
                f"last{layer}_{number}",
                STREAM_LAST,
                inputs=[handle, held[number]],
                outputs=[size],
                controls=[update],
                aliases=(1,),
            )
            (out,) = build.add(
                f"out{layer}_{number}", STREAM_OUT, inputs=[last], outputs=[size], outside=True
            )
            build.add(f"leave{layer}_{number}", STREAM_LEAVE, inputs=[handle, out, held[number]])
            leaves.append(len(build._ops) - 1)
    build.add("end", "NoOp", controls=leaves, chainable=False)
    return build.build()


@settings(deadline=None)
@given(st.integers(2, 6), st.integers(1, 4), st.booleans(), st.floats(1.0, 3.0), st.integers(0, 2**32))
def test_what_an_op_updates_together_never_waits_for_each_other(
    layers: int, variables: int, synced: bool, room: float, seed: int
) -> None:
    graph = fused(layers, variables, 8 * KIB, synced=synced, chance=Random(seed))  # noqa: S311
    nearest = closest(graph, range(len(graph.ops)))
    assert sorted(nearest) == [*range(len(graph.ops))]
    place = positions(nearest)
    assert all(place[one] < place[op.id] for op in graph.ops for one in graph.predecessors[op.id])
    least = least_peak(graph)
    made = planned(graph, int(room * least))
    require_forward(graph, made)
    assert made.peak_bytes <= max(least, int(room * least))


@pytest.mark.parametrize("room", [1.0, 1.5, 3.0])
def test_variables_that_wait_for_other_ranks_come_one_behind_the_other(room: float) -> None:
    """Else all of them came at once, as soon as the gradients are there.

    A run may have one more on the device than is planned: what has left is gone when its copy is done.
    """
    graph = step([16 * KIB] * 8, collective=True)
    made = planned(graph, int(room * least_peak(graph)))
    buffers, chance = Buffers.of(graph), Random(0)  # noqa: S311
    for _ in range(20):
        order = any_order(graph, made.serial_edges, chance)
        assert buffers.timeline(order, ()).peak_bytes <= made.peak_bytes + 16 * KIB


@settings(deadline=None)
@given(SIZES, st.floats(1.0, 3.0))
def test_a_plan_keeps_to_its_budget_and_is_the_same_each_time(sizes: list[int], room: float) -> None:
    graph = step(sizes)
    budget = int(room * least_peak(graph))
    made = planned(graph, budget)
    least = Buffers.of(graph).timeline(closest(graph, made.order), made.swaps).peak_bytes
    assert made.peak_bytes <= max(budget, least)
    assert made == planned(graph, budget)


def test_with_room_the_copies_run_beside_compute() -> None:
    graph = step([16 * KIB] * 8)
    least = planned(graph, 1)
    made = planned(graph, 2 * least.peak_bytes)
    # Three copies of each to the device, on a link that carries one at a time.
    link_s = 3 * 8 * 16 * KIB / 1e6
    compute_s = sum(COSTS.op_seconds(graph))
    assert seconds_of(graph, made) <= 1.15 * max(link_s, compute_s)
    assert seconds_of(graph, least) >= 1.3 * seconds_of(graph, made)


def test_more_room_than_the_link_can_use_is_left_free() -> None:
    graph = step([16 * KIB] * 12)
    made = planned(graph, 100 * least_peak(graph))
    assert made.peak_bytes < 0.7 * 12 * 16 * KIB


def test_an_op_waits_for_what_must_have_left() -> None:
    """Beside the activations there is room for one variable and its gradient at a time."""
    graph = step([64 * KIB, 64 * KIB], activation=KIB)
    made = planned(graph, least_peak(graph))
    names = {(graph.ops[edge.before].name, graph.ops[edge.after].name) for edge in made.serial_edges}
    assert any(before == "leave1" for before, _ in names)
    assert made.feasible


def test_the_chain_never_waits_for_another_rank() -> None:
    graph = step([16 * KIB] * 6, collective=True)
    for room in (1.0, 1.5, 3.0):
        made = planned(graph, int(room * least_peak(graph)))
        require_forward(graph, made)
        reduced = {op.id for op in graph.ops if op.type == "HorovodAllreduce"}
        behind = set(reduced)
        for op in graph.ops:
            if not behind.isdisjoint(graph.predecessors[op.id]):
                behind.add(op.id)
        waits = [edge for edge in made.serial_edges if edge.before in behind]
        assert waits and all(graph.ops[edge.after].type == STREAM_IN for edge in waits)
        assert all(edge.after in behind or "come" in graph.ops[edge.after].name for edge in waits)
        for number in range(6):
            come = next(op.id for op in graph.ops if op.name == f"come{number}")
            reduce = next(op.id for op in graph.ops if op.name == f"reduce{number}")
            assert SerialEdge(reduce, come) in made.serial_edges


@pytest.mark.parametrize(("link", "seconds"), [(1e6, 0.012), (4e6, 0.003)])
def test_an_op_waits_for_a_variable_and_the_step_for_the_last_to_leave(link: float, seconds: float) -> None:
    build = GraphBuilder()
    (handle,) = build.add("handle", "VarHandleOp", outputs=[8])
    (value,) = build.add("value", "ReadVariableOp", inputs=[handle], outputs=[4000])
    (come,) = build.add("come", STREAM_IN, inputs=[value], outputs=[4000])
    (held,) = build.add("enter", STREAM_ENTER, inputs=[handle, come], outputs=[0], aliases=(1,))
    build.add("update", "ResourceApplyGradientDescent", inputs=[handle, held])
    (last,) = build.add(
        "last", STREAM_LAST, inputs=[handle, held], outputs=[4000], controls=[4], aliases=(1,)
    )
    (out,) = build.add("out", STREAM_OUT, inputs=[last], outputs=[4000], outside=True)
    build.add("leave", STREAM_LEAVE, inputs=[handle, out, held])
    graph, costs = build.build(), COSTS.with_link(link)
    own = [0.0] * 8
    own[4] = seconds / 3
    run = clock(range(8), (), costs, own, StreamedCopies.of(graph))
    assert run.starts[4] == pytest.approx(4000 / link)
    assert run.now_s == pytest.approx(seconds / 3 + 2 * 4000 / link)


def test_no_ops_are_repeated_for_the_time_that_the_link_takes_anyway(monkeypatch: pytest.MonkeyPatch) -> None:
    """Swaps add nothing to the time of the streams, so no choice of what to repeat is planned."""
    monkeypatch.setattr(hybrid, "_Search", None)
    graph = step([8 * KIB] * 6)
    config = LMSConfig(policy="auto", min_tensor_bytes=1)
    least, _ = Case.of(graph, config, COSTS).floor
    made = hybrid.decide(graph, config, "GPU", 3 * least, COSTS)
    assert seconds_of(graph, made.plan) > 2 * sum(COSTS.op_seconds(graph)) and not made.plan.swaps
