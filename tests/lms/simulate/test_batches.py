"""Batches that an input pipeline makes ready beside the steps, with and without room of their own."""

from dataclasses import replace
from random import Random
from typing import Any

import pytest

from lms.config import LMSConfig
from lms.ir.graph import Graph, GraphBuilder
from lms.ir.liveness import Buffers
from lms.ir.swap_plan import SwapPlan
from lms.planner import room
from lms.planner.fragmentation import plan_in_pieces
from lms.planner.room import BATCHES, BY_BATCHES, LEAST_BATCHES, Room, predicted_peak
from lms.simulate.allocation_trace import Demand, batch_bytes
from lms.simulate.cost_model import Costs, costs_of
from lms.simulate.executor import Execution, Tasks
from lms.simulate.rehearsal import Rehearsal, bears_batches
from lms.swaps.case import Case

KIB, MIB = 1 << 10, 1 << 20
LIMIT_BYTES = 32 * MIB
STEPS = 32


def net(batch_bytes: int, layer_bytes: int = 8 * MIB) -> Graph:
    """A chain of convolutions whose backward pass needs three of their outputs at once."""
    build = GraphBuilder()
    x, _labels = build.add("next", "IteratorGetNext", outputs=[batch_bytes, 512])
    forward = []
    for layer in range(8):
        (x,) = build.add(
            f"forward{layer}", "Conv2D", inputs=[x], outputs=[layer_bytes], workspace_bytes=36 * KIB
        )
        forward.append(x)
    (gradient,) = build.add("loss", "MatMul", inputs=[x], outputs=[layer_bytes])
    for layer, kept in reversed(list(enumerate(forward))):
        op = f"back{layer}"
        (gradient,) = build.add(
            op, "MatMul", inputs=[gradient, kept], outputs=[layer_bytes], workspace_bytes=36 * KIB
        )
    return build.build([gradient])


def net_of_many_sizes(batch_bytes: int) -> Graph:
    """A chain of layers of four sizes, so that free memory lies in pieces."""
    build = GraphBuilder()
    x, _labels = build.add("next", "IteratorGetNext", outputs=[batch_bytes, 512])
    sizes, forward = [3000 * KIB, 1500 * KIB, 5000 * KIB, 2200 * KIB] * 3, []
    for layer, nbytes in enumerate(sizes):
        (x,) = build.add(f"forward{layer}", "Conv2D", inputs=[x], outputs=[nbytes], workspace_bytes=36 * KIB)
        forward.append(x)
    (gradient,) = build.add("loss", "MatMul", inputs=[x], outputs=[sizes[-1]])
    for layer, kept in reversed(list(enumerate(forward))):
        op, nbytes = f"back{layer}", sizes[layer - 1] if layer else 64 * KIB
        (gradient,) = build.add(
            op, "MatMul", inputs=[gradient, kept], outputs=[nbytes], workspace_bytes=36 * KIB
        )
    return build.build([gradient])


def planned(
    graph: Graph, costs: Costs | None = None, limit_bytes: int = LIMIT_BYTES
) -> tuple[Case, SwapPlan]:
    """The plan for the limit."""
    made = LMSConfig(policy="auto")
    case = Case.of(graph, made, costs or Costs(makes_batches=True))
    return case, plan_in_pieces(case, made, limit_bytes)


def out_of_memory(
    graph: Graph, plan: SwapPlan, ahead: int, seed: int, limit_bytes: int = LIMIT_BYTES
) -> bool:
    """Rehearse steps while the pipeline makes batches at random; tells whether a buffer found no chunk."""
    demand = Demand.of(Buffers.of(graph), plan.order, plan.swaps, batches=plan.batches)
    run, tape, random = Rehearsal(demand, limit_bytes, pooled=True), demand.tape, Random(seed)  # noqa: S311 - the same each time
    own = {register for register, tensor in tape.tensors.items() if tensor in graph.ops[0].outputs}
    sizes = {register: nbytes for register, nbytes in tape.calls if register in own and nbytes > 0}
    made: list[dict[int, int]] = []

    def make() -> bool:
        made.append({register: run.add_register() for register in sizes})
        return run.play([(made[-1][register], nbytes) for register, nbytes in sizes.items()])

    for _ in range(STEPS):
        if not made and not make():
            return True
        taken = made.pop(0)
        calls = [
            (taken.get(register, register), nbytes)
            for register, nbytes in tape.calls
            if register not in own or nbytes <= 0
        ]
        done = 0
        for place in sorted(random.randrange(len(calls)) for _ in range(ahead - len(made))):
            if not run.play(calls[done:place]) or not make():
                return True
            done = place
        if not run.play(calls[done:]):
            return True
        run.end_step()
    return False


@pytest.mark.parametrize("ahead", [1, 2])
def test_batches_that_have_room_of_their_own_do_no_harm(ahead: int) -> None:
    graph = net(600 * KIB)
    case, plan = planned(graph)
    assert plan.swaps and plan.batches == BATCHES
    assert not any(out_of_memory(graph, plan, ahead, seed) for seed in range(20))
    bare = replace(plan, batches=0)
    assert any(out_of_memory(graph, bare, ahead, seed) for seed in range(20)), "else the room is needless"
    assert predicted_peak(case, plan, LIMIT_BYTES) <= LIMIT_BYTES


@pytest.mark.parametrize("ahead", [1, 2])
def test_a_plan_bears_batches_that_lie_between_its_buffers(
    ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, costs, limit_bytes = net_of_many_sizes(1000 * KIB), costs_of("CPU"), 24 * MIB
    _, plan = planned(graph, costs, limit_bytes)
    assert plan.swaps and not plan.batches, "they are too large for room of their own"
    assert not any(out_of_memory(graph, plan, ahead, seed, limit_bytes) for seed in range(20))
    monkeypatch.setattr(room, "bears_batches", lambda *_: True)
    _, other = planned(graph, costs, limit_bytes)
    assert other.peak_bytes > plan.peak_bytes
    assert any(out_of_memory(graph, other, ahead, seed, limit_bytes) for seed in range(20))


def test_a_plan_that_batches_may_break_is_doubted(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, costs, limit_bytes = net_of_many_sizes(1000 * KIB), costs_of("CPU"), 24 * MIB
    case, plan = planned(graph, costs, limit_bytes)
    with monkeypatch.context() as patched:
        patched.setattr(room, "bears_batches", lambda *_: True)
        _, other = planned(graph, costs, limit_bytes)

    has = Room(case, limit_bytes, LMSConfig().margin)
    assert (has.doubt_of(plan), has.doubt_of(other)) == ("", BY_BATCHES)


def test_of_plans_that_fit_the_one_is_taken_that_bears_batches_most_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case, plan = planned(net(600 * KIB), costs_of("CPU"))
    options = [replace(plan, batches=number) for number in range(4)]
    borne = {0: [True, False], 1: [True, True, False], 2: [True, True], 3: [True]}
    monkeypatch.setattr(Room, "rehearsed", lambda _room, made: borne[made.batches])

    def surest(count: int, costs: Costs = case.costs) -> SwapPlan | None:
        return Room(replace(case, costs=costs), LIMIT_BYTES, 0.1).surest(options[:count])

    assert [surest(count) for count in range(5)] == [None, options[0], options[1], options[2], options[2]]
    assert surest(4, costs_of("GPU")) == options[0], "batches do not come between its buffers"


def test_where_no_plan_bears_batches_fillers_do_better(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, costs, limit_bytes = net(768 * KIB, 6 * MIB), costs_of("CPU"), 28 * MIB

    def failures(plan: SwapPlan) -> int:
        demand = Demand.of(Buffers.of(graph), plan.order, plan.swaps, None, plan.fillers)
        return sum(not bears_batches(demand, limit_bytes, 768 * KIB, 3, seed) for seed in range(20))

    _, plan = planned(graph, costs, limit_bytes)
    assert plan.fillers
    monkeypatch.setattr(Room, "surest", lambda _room, options: next(options))
    _, bare = planned(graph, costs, limit_bytes)
    assert not bare.fillers
    assert failures(plan) <= 5 and failures(bare) >= 15


def test_batches_that_the_margin_does_not_hold_are_not_rehearsed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def noted(*given: Any) -> bool:
        asked.append(given[3])
        return True

    monkeypatch.setattr(room, "bears_batches", noted)
    planned(net_of_many_sizes(3 * MIB), costs_of("CPU"), 24 * MIB)
    assert not asked
    planned(net_of_many_sizes(MIB), costs_of("CPU"), 24 * MIB)
    assert asked and set(asked) == {2}


def test_room_is_kept_for_no_more_batches_than_the_margin_holds() -> None:
    seen = {nbytes: planned(net(nbytes))[1].batches for nbytes in (8 * KIB, 256 * KIB, 750 * KIB, MIB)}
    assert seen == {8 * KIB: 0, 256 * KIB: BATCHES, 750 * KIB: LEAST_BATCHES, MIB: 0}
    assert batch_bytes(Buffers.of(net(256 * KIB))) == 256 * KIB, "labels are small buffers"


def test_a_gpu_keeps_no_room_for_batches_that_are_made_on_the_host() -> None:
    _, plan = planned(net(256 * KIB), Costs(makes_batches=False))
    assert plan.swaps and not plan.batches
    assert [costs_of(kind).makes_batches for kind in ("CPU", "GPU")] == [True, False]


def test_runs_by_chance_know_of_the_room() -> None:
    graph = net(600 * KIB)
    case, plan = planned(graph)
    run = Execution(Tasks(case.buffers, plan, case.costs), Random(1))  # noqa: S311 - the same each time
    assert run.demand(None).room_for_batches == (600 * KIB,) * plan.batches
