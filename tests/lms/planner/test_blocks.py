"""Choices of runs of blocks are valid, fit as they were meant to, and win where others do not."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_planner_properties import SLOW_LINK
from test_recompute_properties import MODEST, steps, value_of

from lms.config import LMSConfig
from lms.ir.graph import Graph, GraphBuilder
from lms.planner.blocks import Blocks
from lms.planner.choices import Choices
from lms.planner.hybrid import decide
from lms.planner.recomputation import recompute
from lms.simulate.cost_model import Costs
from lms.simulate.step_time import clock
from lms.swaps.case import Case

MIB = 2**20
LAYER = 64 * MIB
MATMUL_S = 0.002
PCIE_3 = Costs(flops_per_s=9e12, device_bytes_per_s=6e11, out_bytes_per_s=12e9, in_bytes_per_s=12e9)


def chain(layers: int) -> Graph:
    """A product and an activation a layer; the backward pass reads what both made."""
    build = GraphBuilder()
    (x,) = build.add("batch", "Placeholder", outputs=[LAYER])
    saved: list[tuple[int, int, int]] = []
    for layer in range(layers):
        (y,) = build.add(
            f"matmul{layer}", "MatMul", inputs=[x], outputs=[LAYER], flops=MATMUL_S * PCIE_3.flops_per_s
        )
        saved.append((layer, x, y))
        (x,) = build.add(f"act{layer}", "Erf", inputs=[y], outputs=[LAYER], in_place=())
    (gradient,) = build.add("loss", "Op", inputs=[x], outputs=[LAYER], in_place=())
    for layer, x, y in reversed(saved):
        for name, read, flops in (("act", y, 0.0), ("matmul", x, 2 * MATMUL_S * PCIE_3.flops_per_s)):
            (gradient,) = build.add(
                f"gradient_tape/{name}{layer}",
                "Op",
                inputs=[gradient, read],
                outputs=[LAYER],
                flops=flops,
                in_place=(),
            )
    return build.build([gradient])


def blocks_of(graph: Graph, share: float, costs: Costs = PCIE_3) -> tuple[Case, Blocks, int]:
    case = Case.of(graph, LMSConfig(min_tensor_bytes=1), costs)
    budget = int(case.peak_before_bytes * share)
    return case, Blocks(case, Choices(case, 1), budget), budget


@MODEST
@given(steps(), st.floats(0.2, 1.0), st.booleans())
def test_a_choice_drops_what_may_be_dropped_and_no_value_changes(graph, share, moves):
    case, blocks, _ = blocks_of(graph, share, SLOW_LINK)
    choices = Choices(case, 1)
    found = [*blocks.choices(moves=moves)]
    assert found == [*blocks_of(graph, share, SLOW_LINK)[1].choices(moves=moves)]
    for choice in found:
        assert choice.dropped.issubset(choices.repeats.candidates)
        assert choices.repeats.saved.isdisjoint(choice.retained)
        made = recompute(choices.repeats, choice.dropped, choice.retained)
        known: tuple[dict[int, object], dict[int, object]] = ({}, {})
        for new, old in enumerate(made.tensors):
            assert value_of(made.graph, new, known[0]) == value_of(graph, old, known[1])


@pytest.mark.parametrize("share", [0.3, 0.5, 0.7])
def test_what_is_kept_and_repeated_without_copies_fits_as_it_was_meant_to(share):
    case, blocks, budget = blocks_of(chain(24), share)
    (choice,) = blocks.choices(moves=False)
    made = recompute(Choices(case, 1).repeats, choice.dropped, choice.retained)
    again = Case.of(made.graph, LMSConfig(min_tensor_bytes=1, recompute="only"), PCIE_3)
    assert min(one.timeline.peak_bytes for one in again.schedules) <= budget
    assert len(made.repeated) < len(case.graph.ops) / 2


def test_products_are_repeated_only_where_activations_do_not_suffice():
    for share, repeats_products in ((0.6, False), (0.3, True)):
        case, blocks, _ = blocks_of(chain(24), share)
        (choice,) = blocks.choices(moves=False)
        made = recompute(Choices(case, 1).repeats, choice.dropped, choice.retained)
        products = {case.graph.ops[made.ops[op]].type for op in made.repeated} & {"MatMul"}
        assert bool(products) == repeats_products


def test_a_budget_below_any_block_has_no_choice():
    _, blocks, _ = blocks_of(chain(8), 0.05)
    assert not [*blocks.choices(moves=True)]


def slowdown(graph: Graph, share: float) -> float:
    case = Case.of(graph, LMSConfig(), PCIE_3)
    config = LMSConfig(policy="budget", budget_bytes=int(case.frugal.timeline.peak_bytes * share), margin=0.0)
    decided = decide(graph, replace(config, recompute="auto"), "GPU", None, PCIE_3)
    assert decided.plan.feasible
    made = decided.plan
    return clock(made.order, made.swaps, PCIE_3, decided.case.seconds).now_s / sum(case.seconds)


def test_plans_of_runs_win_where_memory_is_short(monkeypatch):
    graph = chain(64)
    best = slowdown(graph, 1 / 8)
    monkeypatch.setattr(Blocks, "choices", lambda self, *, moves: iter(()))
    assert best < 0.95 * slowdown(graph, 1 / 8)
