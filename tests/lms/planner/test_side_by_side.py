"""Plans whose bytes fit and whose buffers do not: neighbours make room."""

from dataclasses import replace
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lms.config import LMSConfig
from lms.ir.graph import Graph, GraphBuilder
from lms.ir.swap_plan import SwapPlan
from lms.planner import fragmentation
from lms.planner.fragmentation import MENDS, plan_in_pieces, predicted_peak
from lms.planner.planner import Case, Way
from lms.simulate.allocation_trace import Demand
from lms.simulate.cost_model import Costs
from lms.simulate.rehearsal import Rehearsal, peak_in_pieces

MIB = 1 << 20
COSTS = Costs(out_bytes_per_s=1e9, in_bytes_per_s=1e9)
CONFIG = LMSConfig(min_tensor_bytes=MIB, margin=0.0, policy="auto")


def with_two_gaps() -> Graph:
    """Return a step in which three buffers of 4 MiB stay, two with a gap behind, and then 8 MiB are made.

    In 20 MiB the two gaps of 4 MiB are no neighbours. The first one of the three is needed again last.
    """
    build = GraphBuilder()
    (images,) = build.add("images", "Placeholder", outputs=[256])
    (first,) = build.add("first", "Conv2D", inputs=[images], outputs=[4 * MIB])
    (second,) = build.add("second", "Conv2D", inputs=[first], outputs=[4 * MIB])
    (gap,) = build.add("gap", "Conv2D", inputs=[second], outputs=[4 * MIB])
    (third,) = build.add("third", "Conv2D", inputs=[gap], outputs=[4 * MIB])
    (end,) = build.add("end", "Conv2D", inputs=[third], outputs=[4 * MIB])
    (small,) = build.add("small", "Conv2D", inputs=[end], outputs=[256])
    (large,) = build.add("large", "Conv2D", inputs=[small], outputs=[8 * MIB])
    (loss,) = build.add("loss", "Conv2D", inputs=[large], outputs=[256])
    for name, kept in (("b3", third), ("b2", second), ("b1", first)):
        (loss,) = build.add(name, "ConvGrad", inputs=[kept, loss], outputs=[256])
    return build.build(kept=[loss])


def fits(case: Case, made: SwapPlan, size: int) -> bool:
    demand = Demand.of(case.buffers, made.order, made.swaps, edited=True)
    return peak_in_pieces(demand, size, pooled=True) is not None


SIZE = 20 * MIB + 4096


def test_a_neighbour_of_the_gap_goes_not_what_is_needed_last(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case.of(with_two_gaps(), CONFIG, COSTS)
    made = plan_in_pieces(case, CONFIG, SIZE)
    assert [case.graph.tensor_name(swap.tensor) for swap in made.swaps] in (["second:0"], ["third:0"])
    assert fits(case, made, SIZE)
    # Plans for fewer bytes send away first what is needed last, and that makes no room.
    monkeypatch.setattr(fragmentation, "mend", lambda *_: (None, 0))
    again = Case.of(with_two_gaps(), CONFIG, COSTS)
    assert plan_in_pieces(again, CONFIG, SIZE).bytes_out > made.bytes_out


def test_the_first_buffer_without_a_chunk_is_told_with_all_that_lies_there() -> None:
    case = Case.of(with_two_gaps(), CONFIG, COSTS)
    demand = Demand.of(case.buffers, case.given.order, (), edited=True)
    stuck = Rehearsal(demand, SIZE, pooled=True).stuck(1)
    assert stuck is not None and stuck.nbytes == 8 * MIB
    tensors = demand.tape.tensors
    name = case.graph.tensor_name
    large = [chunk for chunk in stuck.chunks if chunk.nbytes >= MIB]
    assert [None if one.register is None else name(tensors[one.register]) for one in large] == [
        *("first:0", "second:0", None, "third:0", None)
    ]
    assert sum(chunk.nbytes for chunk in stuck.chunks) == SIZE
    assert Rehearsal(demand, 25 * MIB, pooled=True).stuck(1) is None


@st.composite
def chains(draw: st.DrawFn) -> Graph:
    """Return a forward pass of layers of many sizes and its backward pass."""
    build = GraphBuilder()
    (value,) = build.add("images", "Placeholder", outputs=[256])
    kept = []
    for layer in range(draw(st.integers(3, 9))):
        for part in range(draw(st.integers(1, 2))):
            size = draw(st.integers(1, 9)) * MIB
            (value,) = build.add(f"f{layer}.{part}", "Conv2D", inputs=[value], outputs=[size])
        kept.append(value)
    (loss,) = build.add("loss", "Conv2D", inputs=[value], outputs=[256])
    for number, one in enumerate(reversed(kept)):
        size = draw(st.integers(1, 9)) * MIB
        (loss,) = build.add(f"b{number}", "ConvGrad", inputs=[one, loss], outputs=[size])
    return build.build(kept=[loss])


@settings(max_examples=60, deadline=None)
@given(
    graph=chains(),
    share=st.floats(0.45, 0.95),
    budget=st.sampled_from([0.8, 0.9, 1.0]),
    threads=st.sampled_from([1, 2]),
)
def test_mends_lose_no_fit_and_no_budget_and_are_the_same_each_time(
    graph: Graph, share: float, budget: float, threads: int
) -> None:
    costs = replace(COSTS, threads=threads)
    case = Case.of(graph, CONFIG, costs)
    size = int(case.peak_before_bytes * share)
    config = replace(CONFIG, policy="budget", budget_bytes=int(size * budget))
    made = plan_in_pieces(case, config, size)
    assert plan_in_pieces(Case.of(graph, config, costs), config, size) == made
    with patch.object(fragmentation, "mend", lambda *_: (None, 0)):
        without = plan_in_pieces(Case.of(graph, config, costs), config, size)
    if predicted_peak(case, without, size) <= size:
        assert predicted_peak(case, made, size) <= size
        assert made.feasible or not without.feasible


def test_a_step_gets_a_bounded_number_of_mends(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case.of(with_two_gaps(), CONFIG, COSTS)
    asked = []

    def never(case: Case, way: Way, sizes: object, most: int, most_s: float) -> tuple[None, int]:
        asked.append(most)
        return None, most

    monkeypatch.setattr(fragmentation, "mend", never)
    monkeypatch.setattr(fragmentation, "MENDED_OPS", 2 * MENDS * len(case.graph.ops))
    plan_in_pieces(case, CONFIG, SIZE)
    assert asked == [MENDS, MENDS]
    monkeypatch.setattr(fragmentation, "MENDED_OPS", MENDS * len(case.graph.ops) - 1)
    plan_in_pieces(Case.of(with_two_gaps(), CONFIG, COSTS), CONFIG, SIZE)
    assert len(asked) == 2, "a step of so many ops gets none"
