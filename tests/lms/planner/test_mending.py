"""Plans whose bytes fit and whose buffers do not: neighbours make room."""

from collections.abc import Sequence
from dataclasses import replace
from math import inf
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lms.config import LMSConfig
from lms.ir.graph import Graph, GraphBuilder
from lms.ir.swap_plan import SwapPlan
from lms.planner import fragmentation, mending, room
from lms.planner.fragmentation import MENDS, plan_in_pieces
from lms.planner.mending import demand_of, mend
from lms.planner.room import Room, predicted_peak, rooms_of
from lms.schedule.schedule import Trip
from lms.simulate.allocation_trace import Demand
from lms.simulate.cost_model import Costs
from lms.simulate.rehearsal import Rehearsal, Stuck, bears_late_frees, peak_in_pieces
from lms.swaps.case import Case, Cost, Way
from lms.swaps.swap_planner import plan_case, plan_trips

MIB = 1 << 20
COSTS = Costs(out_bytes_per_s=1e9, in_bytes_per_s=1e9)
CONFIG = LMSConfig(min_tensor_bytes=MIB, margin=0.0, policy="auto")
BEARS_LATE_FREES = Room.bears_chance


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


@pytest.fixture(autouse=True)
def frees_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Free all buffers in time: without a margin no mended plan bears that one is freed late."""
    monkeypatch.setattr(Room, "bears_chance", lambda *_: True)


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


@pytest.mark.parametrize(("worth", "bears"), [(1.0, False), (2.0, True)])
def test_a_plan_that_bears_late_frees_may_take_little_longer(
    worth: float, bears: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Room, "bears_chance", BEARS_LATE_FREES)
    monkeypatch.setattr(fragmentation, "LATE_WORTH", worth)
    case = Case.of(with_two_gaps(), CONFIG, COSTS)
    made = plan_in_pieces(case, CONFIG, SIZE)
    assert fits(case, made, SIZE) and bears_late_frees(demand_of(case, made), SIZE, 10) == bears


def test_a_plan_that_bears_no_late_frees_is_better_than_one_that_does_not_fit() -> None:
    case = Case.of(with_two_gaps(), CONFIG, COSTS)
    with patch.object(Room, "bears_chance", lambda *_: False):
        made = plan_in_pieces(case, CONFIG, SIZE)
    assert made.swaps and fits(case, made, SIZE)


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
    """Return a forward pass of layers of many sizes and its backward pass, which may assign to variables."""
    build = GraphBuilder()
    assigns = draw(st.booleans())
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
        if assigns:
            (handle,) = build.add(f"momentum{number}", "Placeholder", outputs=[0])
            build.add(f"keep{number}", "AssignVariableOp", inputs=[handle, loss])
    return build.build(kept=[loss])


DEVICES = (
    COSTS,
    replace(COSTS, threads=2, frees_at_once=True),
    replace(COSTS, frees_at_once=True, overlaps=False),
    replace(COSTS, resident_bytes=5 * MIB),
)


@settings(max_examples=60, deadline=None)
@given(
    graph=chains(),
    share=st.floats(0.45, 0.95),
    budget=st.sampled_from([0.8, 0.9, 1.0]),
    margin=st.sampled_from([0.0, 0.1]),
    costs=st.sampled_from(DEVICES),
)
def test_mends_lose_no_fit_and_no_budget_and_are_the_same_each_time(
    graph: Graph, share: float, budget: float, margin: float, costs: Costs
) -> None:
    case = Case.of(graph, CONFIG, costs)
    size = int(case.peak_before_bytes * share)
    config = replace(CONFIG, policy="budget", budget_bytes=int(size * budget), margin=margin)
    made = plan_in_pieces(case, config, size)
    assert plan_in_pieces(Case.of(graph, config, costs), config, size) == made
    with patch.object(fragmentation, "mend", lambda *_: (None, 0)):
        without = plan_in_pieces(Case.of(graph, config, costs), config, size)
    if predicted_peak(case, without, size) <= size:
        assert predicted_peak(case, made, size) <= size
        assert made.feasible or not without.feasible


def test_a_step_of_which_other_choices_are_planned_is_not_mended() -> None:
    case = Case.of(with_two_gaps(), CONFIG, COSTS)
    quick = plan_in_pieces(case, CONFIG, SIZE, thorough=False)
    assert fits(case, quick, SIZE) and quick.bytes_out > plan_in_pieces(case, CONFIG, SIZE).bytes_out


def test_free_pages_lie_in_no_pieces() -> None:
    """An allocator that puts a buffer together from free pages needs no other plan than the bytes say."""
    in_pieces = Case.of(with_two_gaps(), CONFIG, COSTS)
    case = Case.of(with_two_gaps(), CONFIG, replace(COSTS, maps_pages=True))
    made = plan_in_pieces(case, CONFIG, SIZE)
    assert made == plan_case(case, CONFIG, SIZE) and not fits(in_pieces, made, SIZE)
    assert predicted_peak(case, made, SIZE) == made.peak_bytes <= SIZE
    assert rooms_of(case, made, SIZE) == (0, ())
    spacious = replace(CONFIG, policy="budget", budget_bytes=2 * SIZE)
    assert plan_in_pieces(case, spacious, SIZE).peak_bytes <= SIZE, (
        "the device has no more, whatever the budget"
    )


def test_a_mended_plan_fits_whichever_ops_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a plan for less memory is taken, which needs no mend."""
    case = Case.of(with_two_gaps(), CONFIG, COSTS)
    mended = plan_in_pieces(case, CONFIG, SIZE)
    asked = []

    def by_chance(case: Case, made: SwapPlan, sizes: Sequence[int]) -> bool:
        asked.append((made.swaps, *sizes))
        return made.swaps != mended.swaps

    monkeypatch.setattr(room, "_fits_by_chance", by_chance)
    again = plan_in_pieces(Case.of(with_two_gaps(), CONFIG, COSTS), CONFIG, SIZE)
    assert (mended.swaps, SIZE, SIZE) in asked
    assert again.swaps != mended.swaps and fits(case, again, SIZE)


def way_of(graph: Graph, budget: int, *trips: Trip) -> tuple[Case, Way]:
    """Return a step, and the way in which it takes the trips in the order of the graph."""
    case = Case.of(graph, CONFIG, COSTS)
    return case, Way(case.given, trips, budget, plan_trips(case, case.given, trips, budget))


def tensor(case: Case, name: str) -> int:
    return next(one.id for one in case.graph.tensors if case.graph.tensor_name(one.id) == f"{name}:0")


def test_a_copy_back_that_finds_no_room_begins_later() -> None:
    """It would come back where 12 of 13 MiB are in use."""
    build = GraphBuilder()
    (images,) = build.add("images", "Placeholder", outputs=[256])
    (early,) = build.add("early", "Conv2D", inputs=[images], outputs=[4 * MIB])
    (value,) = build.add("f0", "Conv2D", inputs=[early], outputs=[4 * MIB])
    (beside,) = build.add("beside", "Conv2D", inputs=[value], outputs=[4 * MIB])
    (value,) = build.add("large", "Conv2D", inputs=[beside], outputs=[8 * MIB])
    (value,) = build.add("f1", "Conv2D", inputs=[value, beside], outputs=[256])
    for number in range(2, 4):
        (value,) = build.add(f"f{number}", "Conv2D", inputs=[value], outputs=[4 * MIB])
    (loss,) = build.add("loss", "Conv2D", inputs=[value], outputs=[256])
    (loss,) = build.add("back", "ConvGrad", inputs=[early, loss], outputs=[256])
    graph = build.build(kept=[loss])
    steps = {op.name: step for step, op in enumerate(graph.ops[1:])}
    trip = Trip(early, steps["f0"], steps["back"], trigger=steps["large"], freed=steps["beside"])
    case, way = way_of(graph, 16 * MIB, trip)
    size = 13 * MIB
    assert not fits(case, way.plan, size)
    made, done = mend(case, way, (size,), MENDS, (inf, 0))
    assert made is not None and fits(case, made, size)
    assert done == 1
    ((back,),) = [swap.swap_ins for swap in made.swaps]
    assert case.graph.ops[back.trigger].name == "f2", "halfway to its reader"
    assert mend(case, way, (size,), 0, (inf, 0)) == (None, 0)
    assert mend(case, way, (size,), MENDS, (0.0, 0)) == (None, 1), "a plan that costs more than one known"


def test_what_a_later_mend_makes_needless_is_taken_back() -> None:
    graph = with_two_gaps()
    case, way = way_of(graph, SIZE)
    names = [tensor(case, name) for name in ("first", "second", "third")]
    step = case.given.step
    large = step[next(op.id for op in graph.ops if op.name == "large")]
    trips = [
        Trip(one, case.given.uses[one][-2], case.given.uses[one][-1], case.given.uses[one][-1] - 1, large)
        for one in names[:2]
    ]
    made = plan_trips(case, case.given, trips, SIZE)
    spared = mending._spared(case, way, made, dict.fromkeys(trips), (SIZE,), MENDS)
    assert [swap.tensor for swap in spared.swaps] == [names[1]]
    assert fits(case, spared, SIZE)


def test_a_chunk_that_was_handed_on_twice_is_its_last_taker_s() -> None:
    """A buffer that came back twice may be taken over twice, each time by another op."""
    build = GraphBuilder()
    (images,) = build.add("images", "Placeholder", outputs=[256])
    (kept,) = build.add("kept", "Conv2D", inputs=[images], outputs=[4 * MIB])
    value = kept
    for number in range(3):
        (value,) = build.add(f"f{number}", "Conv2D", inputs=[value], outputs=[256])
    (middle,) = build.add("middle", "AddV2", inputs=[kept, value], outputs=[4 * MIB], in_place=[0])
    (value,) = build.add("f4", "Conv2D", inputs=[middle], outputs=[256])
    for number in range(5, 8):
        (value,) = build.add(f"f{number}", "Conv2D", inputs=[value], outputs=[256])
    (last,) = build.add("last", "AddV2", inputs=[kept, value], outputs=[4 * MIB], in_place=[0])
    (loss,) = build.add("loss", "Conv2D", inputs=[last], outputs=[256])
    graph = build.build(kept=[loss])
    config = replace(CONFIG, min_tensor_bytes=1)
    case = Case.of(graph, config, COSTS)
    uses = case.given.uses[kept]
    trips = [
        Trip(kept, left, back, back - 1, left + 1)
        for left, back in zip(uses, uses[1:], strict=False)
        if back - left > 1
    ]
    assert len(trips) == 2
    made = plan_trips(case, case.given, trips, 100 * MIB)
    tape = demand_of(case, made).tape
    taken = [(tape.tensors[register], one) for register, handed in tape.handed.items() for _, one in handed]
    assert taken == [(kept, middle), (kept, last)]
    way = Way(case.given, tuple(trips), 100 * MIB, made)
    at_loss = Stuck(next(one for one, owner in tape.tensors.items() if owner == loss), 256, [])
    neighbours = mending._Neighbours(case, way, made, {}, at_loss)
    assert [neighbours._tensor_of(register) for register in tape.handed] == [middle, last]


def test_a_step_gets_a_bounded_number_of_mends(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case.of(with_two_gaps(), CONFIG, COSTS)
    asked = []

    def never(case: Case, way: Way, sizes: object, most: int, most_cost: Cost) -> tuple[None, int]:
        asked.append(most)
        return None, most

    monkeypatch.setattr(fragmentation, "mend", never)
    monkeypatch.setattr(fragmentation, "MENDED_OPS", 2 * MENDS * len(case.graph.ops))
    plan_in_pieces(case, CONFIG, SIZE)
    assert asked == [MENDS, MENDS]
    monkeypatch.setattr(fragmentation, "MENDED_OPS", MENDS * len(case.graph.ops) - 1)
    plan_in_pieces(Case.of(with_two_gaps(), CONFIG, COSTS), CONFIG, SIZE)
    assert len(asked) == 2, "a step of so many ops gets none"
