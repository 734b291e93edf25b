"""Random steps with random purity: what is repeated, in which order, and what the plans for it hold.

The oracle of ``test_planner_properties`` runs what was planned as an executor might.
"""

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_planner_properties import SLOW_LINK, check

from lms.config import LMSConfig
from lms.ir.graph import Graph, GraphBuilder
from lms.ir.liveness import Buffers
from lms.ir.op_traits import AGAIN, REPEATABLE_TYPES
from lms.planner.hybrid import decide, plan_recomputed
from lms.planner.recomputation import Recomputation, Repeats, recompute
from lms.schedule.op_order import early_ops
from lms.simulate.step_time import simulate
from lms.swaps.swap_planner import plan

PURE = ("MatMul", "ConcatV2", "Relu", "AddV2", "Reshape")
IMPURE = ("RandomUniform", "StatelessRandomUniformV2", "AssignAddVariableOp", "Op", "AddN", "MaxPool")
COLLECTIVE = "HorovodAllreduce"
MODEST = settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)


@st.composite
def steps(draw: st.DrawFn, collectives: bool = False) -> Graph:
    """A forward pass of random purity, and a backward pass that reads what it made, the last first.

    Some ops of the forward pass come between those of the backward pass.
    """
    build = GraphBuilder()
    tensors: list[int] = []
    sizes: dict[int, int] = {}
    kinds = PURE * 3 + IMPURE + (COLLECTIVE,) * collectives

    def add(name: str, kind: str, inputs: list[int]) -> None:
        passes_on = kind in ("Relu", "AddV2", "Reshape")
        nbytes = sizes[inputs[0]] if passes_on and inputs else draw(st.integers(1, 6)) * 256
        read = inputs[:1] if kind == "Reshape" else inputs
        (made,) = build.add(name, kind if inputs else "Op", inputs=read, outputs=[nbytes])
        tensors.append(made)
        sizes[made] = nbytes

    for number in range(draw(st.integers(2, 14))):
        inputs = draw(st.lists(st.sampled_from(tensors[-4:]), min_size=1, max_size=2)) if tensors else []
        add(f"layer{number}", draw(st.sampled_from(kinds)), inputs)
    forward = list(tensors)
    for number in range(draw(st.integers(1, 14))):
        if draw(st.integers(0, 3)) == 0:
            add(f"aside{number}", draw(st.sampled_from(PURE)), [draw(st.sampled_from(forward))])
            forward.append(tensors.pop())
        saved = forward[max(0, len(forward) - number - 2) :]
        read = [tensors[-1], *draw(st.lists(st.sampled_from(saved), max_size=2))]
        add(f"gradient_tape/layer{number}", draw(st.sampled_from(("MatMul", "Op", "AddV2"))), read)
    return build.build([tensors[-1]])


def value_of(graph: Graph, tensor: int, known: dict[int, object]) -> object:
    """What a tensor stands for: a repeated op makes what the op that it repeats makes."""
    if tensor not in known:
        made = graph.tensors[tensor]
        op = graph.ops[made.op]
        read = tuple(value_of(graph, one, known) for one in op.inputs)
        known[tensor] = (op.name.removesuffix(f"/{AGAIN}"), made.index, read)
    return known[tensor]


def some_of(graph: Graph, number: int) -> Recomputation:
    """Drop the candidates that the bits of a number choose; some are repeated ahead of their need."""
    repeats = Repeats(Buffers.of(graph), 1)
    dropped = [root for bit, root in enumerate(repeats.candidates) if number >> bit & 1]
    return recompute(repeats, dropped, ahead=number % 3)


@MODEST
@given(steps(collectives=True), st.integers(0, 2**14 - 1))
def test_only_pure_ops_run_twice_and_no_value_changes(graph, number):
    made = some_of(graph, number)
    known: tuple[dict[int, object], dict[int, object]] = ({}, {})
    for new, old in enumerate(made.tensors):
        assert value_of(made.graph, new, known[0]) == value_of(graph, old, known[1])
    for new, old in enumerate(made.ops):
        now, before = made.graph.ops[new], graph.ops[old]
        assert [value_of(made.graph, one, known[0]) for one in now.inputs] == [
            value_of(graph, one, known[1]) for one in before.inputs
        ]
    assert [made.ops[op] for op in made.places] == list(range(len(graph.ops)))
    repeated = [graph.ops[made.ops[op]] for op in made.repeated]
    assert len({op.id for op in repeated}) == len(repeated), "an op runs three times"
    assert all(op.type in REPEATABLE_TYPES and op.type not in IMPURE for op in repeated)
    assert not any(op.type == COLLECTIVE for op in repeated)


@MODEST
@given(steps(), st.integers(0, 2**14 - 1))
def test_repeated_ops_wait_for_the_backward_pass(graph, number):
    made = some_of(graph, number)
    late = Repeats(Buffers.of(graph), 1).late
    behind: set[int] = set()
    for op in made.graph.ops:
        if made.ops[op.id] in late or not behind.isdisjoint(made.graph.predecessors[op.id]):
            behind.add(op.id)
    assert behind.issuperset(made.repeated)
    for new in range(len(made.ops)):
        reads_copy = any(made.graph.tensors[one].op in made.repeated for one in made.graph.ops[new].inputs)
        assert not reads_copy or new in made.repeated or made.ops[new] in late


def test_nothing_is_repeated_ahead_of_the_op_that_it_repeats():
    build = GraphBuilder()
    (batch,) = build.add("next", "IteratorGetNext", outputs=[1024])
    (size,) = build.add("gradient_tape/size", "Op", inputs=[batch], outputs=[1024])
    (scale,) = build.add("gradient_tape/scale", "Op", inputs=[size], outputs=[1024])
    (drawn,) = build.add("drawn", "RandomUniform", inputs=[batch], outputs=[1024])
    (saved,) = build.add("relu", "Relu", inputs=[drawn], outputs=[1024])
    (first,) = build.add("gradient_tape/first", "MatMul", inputs=[scale, saved], outputs=[1024])
    repeats = Repeats(Buffers.of(build.build([first])), 1)
    assert saved in repeats.candidates and len(repeats.redirected) == 2
    made = recompute(repeats, [saved], ahead=1)
    assert [made.graph.ops[op].name for op in made.repeated] == [f"relu/{AGAIN}"]


@pytest.mark.parametrize(
    ("maker", "may"), [("Assign", False), ("ScatterNdUpdate", False), ("ScatterNd", True)]
)
def test_what_reads_a_variable_through_its_update_is_not_repeated(maker, may):
    build = GraphBuilder()
    (value,) = build.add("value", "Placeholder", outputs=[4096])
    (made,) = build.add("made", maker, inputs=[value], outputs=[4096])
    (read,) = build.add("read", "Square", inputs=[made], outputs=[4096])
    build.add("gradient_tape/grad", "Mul", inputs=[read, read], outputs=[4096])
    assert Repeats(Buffers.of(build.build()), 1).is_repeatable(2) is may


def test_what_runs_without_a_batch_reads_no_copy():
    build = GraphBuilder()
    (weight,) = build.add("weight", "ReadVariableOp", outputs=[1024], outside=True)
    (saved,) = build.add("relu", "Relu", inputs=[weight], outputs=[1024])
    (batch,) = build.add("next", "IteratorGetNext", outputs=[1024])
    (x,) = build.add("x", "MatMul", inputs=[batch, saved], outputs=[1024])
    (first,) = build.add("gradient_tape/first", "MatMul", inputs=[x, x], outputs=[1024])
    (second,) = build.add("gradient_tape/second", "MatMul", inputs=[first, saved], outputs=[1024])
    (decay,) = build.add("gradient_tape/decay", "Op", inputs=[weight], outputs=[1024])
    (third,) = build.add("gradient_tape/third", "MatMul", inputs=[decay, saved], outputs=[1024])
    build.add("update", "AssignSubVariableOp", inputs=[third], outputs=[])
    graph = build.build([second])
    early = early_ops(graph)
    assert "gradient_tape/third" in {graph.ops[op].name for op in early}
    repeats = Repeats(Buffers.of(graph), 1)
    made = recompute(repeats, repeats.candidates)
    assert saved in made.dropped
    assert early_ops(made.graph) >= {made.places[op] for op in early}


@MODEST
@given(steps(), st.integers(0, 2**14 - 1), st.sampled_from(("off", "only")), st.integers(0, 99))
def test_no_run_reads_what_is_gone_or_takes_more_than_planned(graph, number, recomputing, seed):
    made = some_of(graph, number)
    config = LMSConfig(policy="all", min_tensor_bytes=1, recompute=recomputing)
    before = plan(graph, config, costs=SLOW_LINK).peak_before_bytes
    decided = plan_recomputed(made, config, "GPU", None, SLOW_LINK, before)
    if decided.relocation is None:
        check(made.graph, decided.plan, seed)
    assert recomputing == "off" or not decided.plan.swaps


@pytest.mark.slow
@MODEST
@given(steps(), st.floats(0.3, 1.0), st.sampled_from(("auto", "only")))
def test_a_plan_meets_its_budget_or_says_so_and_is_no_slower_than_swaps_alone(graph, share, recomputing):
    whole = plan(graph, LMSConfig(policy="all", min_tensor_bytes=1), costs=SLOW_LINK)
    config = LMSConfig(
        policy="budget",
        budget_bytes=max(1, int(whole.peak_before_bytes * share)),
        margin=0.0,
        min_tensor_bytes=1,
        recompute=recomputing,
    )
    decided = decide(graph, config, "GPU", None, SLOW_LINK)
    made = decided.plan
    assert made == decide(graph, config, "GPU", None, SLOW_LINK).plan, "the same input gives another plan"
    if made.is_empty:
        return
    assert made.feasible == (made.peak_bytes <= (made.budget_bytes or 0))
    buffers = Buffers.of(decided.graph)
    assert made.peak_bytes == buffers.timeline(made.order, made.swaps).peak_bytes
    alone = decide(graph, replace(config, recompute="off"), "GPU", None, SLOW_LINK)
    assert recomputing == "only" or made.feasible or not alone.plan.feasible
    if recomputing == "auto" and alone.plan.feasible:
        timing, old = (
            simulate(Buffers.of(one.graph), one.plan.order, one.plan.swaps, SLOW_LINK)
            for one in (decided, alone)
        )
        assert timing.makespan_s <= old.makespan_s * (1 + 1e-9)
