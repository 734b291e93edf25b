"""Fillers: what they take, where they are found, and what they are good for."""

from dataclasses import replace

import pytest
from child_job import run_job

from lms.ir.graph import Graph, GraphBuilder, Use
from lms.ir.liveness import Residency
from lms.ir.swap_plan import Filler, Swap, SwapIn, SwapPlan
from lms.simulate.allocation_trace import Demand, Filled, Update, filled
from lms.simulate.bfc_arena import LEFT, NOWHERE, Arena
from lms.simulate.fillers import SHARES, find_fillers
from lms.simulate.pool_map import map_pool
from lms.simulate.rehearsal import peak_in_pieces

K = 1 << 20
NEAR = 1024
"""Bytes that rounding may add: the chunk is taken in pieces."""


def test_a_filler_takes_what_a_buffer_would_be_given_beyond_its_size() -> None:
    arena = Arena(12 * K)
    offset, taken = arena.take_rest([8 * K], K)
    assert offset == 12 * K - taken, "at the end of the chunk"
    assert 0 <= taken - (4 * K - 4 * K // LEFT) <= NEAR
    first = arena.allocate(8 * K)
    assert first == 0 and arena.size_of(first) == 12 * K - taken
    assert arena.peak == 12 * K
    arena.release(offset)
    assert arena.allocate(3 * K) == offset


@pytest.mark.parametrize(
    ("sizes", "least"),
    [([4 * K], K), ([8 * K], 5 * K), ([12 * K], K), ([20 * K], K), ([8 * K, 8 * K], K), ([], K)],
)
def test_a_filler_takes_nothing_where_little_is_spared(sizes: list[int], least: int) -> None:
    """A chunk that is divided anyway, too little, one that fits, none that is large enough, no buffer."""
    arena = Arena(12 * K)
    offset, taken = arena.take_rest(sizes, least)
    assert (offset, taken) == (NOWHERE, 0) and arena.used == 0
    assert arena.allocate(12 * K) == 0
    arena.release(offset)
    assert arena.used == 12 * K, "what took nothing frees nothing"


def test_a_filler_looks_at_all_buffers_of_its_point() -> None:
    """Two of 4 MiB are cut off the chunk of 12, and a third would be given all that is left."""
    arena = Arena(14 * K)
    _, taken = arena.take_rest([4 * K] * 3, K)
    assert 0 <= taken - (2 * K - 2 * K // LEFT) <= NEAR
    assert arena.peak == 14 * K
    assert [arena.allocate(4 * K) for _ in range(3)] == [0, 4 * K, 8 * K]


def chain_of(*op_types: str) -> Graph:
    build = GraphBuilder()
    (x,) = build.add("x", "Conv2D", outputs=[8 * K])
    for number, op_type in enumerate(op_types, 1):
        (x,) = build.add(f"op_{number}", op_type, inputs=[x], outputs=[K])
    return build.build()


def planned(graph: Graph, *swaps: Swap) -> SwapPlan:
    return SwapPlan("budget", tuple(range(len(graph.ops))), swaps, (), (), 0, 0, 0, None)


def found_in(demand: Demand, graph: Graph, *swaps: Swap, overlaps: bool = False) -> tuple[Filler, ...]:
    plan = planned(graph, *swaps)
    return find_fillers(demand, 12 * K, graph, plan, {*plan.order}, overlaps=overlaps)


def test_a_step_fits_with_fillers_that_does_not_without() -> None:
    """The op at point 0 is given 12 MiB for 8, while that at point 2 wants 3."""
    stays = (Residency(0, 8 * K, 0, 4), Residency(1, 3 * K, 2, 4), Residency(2, K // 4, 4, 4))
    demand, graph = Demand(stays), chain_of("Conv2D", "Conv2D")
    assert peak_in_pieces(demand, 12 * K) is None
    fillers = found_in(demand, graph)
    assert fillers[0] == Filler(0, False, (8 * K,), 12 * K // SHARES[-1], 1, 0, 1)
    assert peak_in_pieces(replace(demand, fillers=filled(fillers, (0, 1, 2))), 12 * K) == 12 * K
    outside = find_fillers(demand, 12 * K, graph, planned(graph), {1, 2}, overlaps=False)
    assert 0 not in {one.op for one in outside}, "the op is not in the chain"


def test_a_point_whose_buffers_fit_exactly_keeps_no_later_one_from_its_filler() -> None:
    stays = (
        *(Residency(i, 6 * K, 0, 1) for i in (0, 1)),
        Residency(2, 8 * K, 4, 7),
        Residency(3, 3 * K, 6, 7),
    )
    demand = Demand(stays)
    (made,) = found_in(demand, chain_of("Conv2D", "Conv2D", "Conv2D"))
    assert (made.op, made.sizes) == (2, (8 * K,))
    assert peak_in_pieces(replace(demand, fillers=filled([made], (0, 1, 2, 3))), 12 * K) == 12 * K


@pytest.mark.parametrize("op_type", ["Loop", "Merge"])
def test_what_allocates_more_than_once_or_may_be_dead_gets_no_filler(op_type: str) -> None:
    stays = (Residency(0, 8 * K, 2, 4), Residency(1, 3 * K, 4, 4))
    assert [one.op for one in found_in(Demand(stays), chain_of("Conv2D", "Conv2D"))] == [1]
    assert not found_in(Demand(stays), chain_of(op_type, "Conv2D"))


def test_a_filler_for_copies_stays_until_the_first_of_them_is_read() -> None:
    graph = chain_of("Conv2D", "Conv2D", "Conv2D")
    swaps = (Swap(0, 8 * K, 0, (SwapIn(1, (Use(3, 0),)),)),)
    stays = (Residency(0, 8 * K, 3, 6), Residency(1, 3 * K, 6, 6))
    (made,) = found_in(Demand(stays), graph, *swaps, overlaps=True)
    assert made == Filler(1, True, (8 * K,), 12 * K // SHARES[-1], 2, 2, 3)
    assert filled((made,), (0, 1, 2, 3)) == {3: Filled(made.sizes, made.least, 5)}
    assert {(edge.before, edge.after) for edge in made.edges} == {(1, 2), (2, 3)}
    another = Swap(1, K, 1, (SwapIn(1, (Use(2, 0),)),))
    assert not found_in(Demand(stays), graph, *swaps, another, overlaps=True), "each would wait for both"
    assert found_in(Demand(stays), graph, *swaps, another)


def test_each_filler_that_is_found_is_played() -> None:
    """Also where a variable is copied at its point."""
    demand = Demand((Residency(0, K, 0, 4),), (Update(2, 9, 8 * K, None, 4),))
    fillers = found_in(demand, chain_of("Conv2D", "Conv2D"))
    assert len(replace(demand, fillers=filled(fillers, (0, 1, 2))).tape.fills) == len(fillers)


def test_a_full_region_is_drawn_with_fillers_that_take_nothing() -> None:
    demand = Demand(
        (Residency(0, 8 * K, 0, 4), Residency(1, 8 * K, 2, 4)), fillers={2: Filled((8 * K,), K, 2)}
    )
    assert map_pool(demand, 8 * K, pooled=False).used == 16 * K


@pytest.mark.tensorflow
def test_the_allocator_does_what_is_simulated() -> None:
    """In a region of 62 MiB with a chunk of 8 in use."""
    pytest.importorskip("tensorflow")
    seen = run_job(
        "filler_job.py",
        TF_CPU_ALLOCATOR_USE_BFC="true",
        TF_CPU_BFC_MEM_LIMIT_IN_MB="64",
        CUDA_VISIBLE_DEVICES="",
    )
    assert abs(seen["taken"] - seen["simulated"]) <= NEAR, "but for small tensors of eager execution"
    assert abs(seen["peak"] - seen["simulated peak"]) <= NEAR
    assert seen["simulated"] > 8 * K
    assert seen["given"] < seen["given without"] - 8 * K
    assert seen["nothing"] == 0, "where half of the chunk would remain"
    assert seen["too large"] == 0, "nothing fails where there is no room at all"
