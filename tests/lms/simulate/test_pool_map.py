"""The pool at its fullest moment: the chunks are those of the rehearsal, and nothing lies on anything."""

from itertools import pairwise

import pytest

from lms.config import LMSConfig
from lms.ir.graph import Graph, GraphBuilder
from lms.ir.liveness import Buffers, positions
from lms.simulate.allocation_trace import Demand
from lms.simulate.cost_model import Costs
from lms.simulate.pool_map import map_pool
from lms.simulate.rehearsal import STEPS, Rehearsal, steps_to_run
from lms.simulate.step_time import NotedClock, clock, simulate, stays_in_time
from lms.swaps.swap_planner import plan

KIB = 1 << 10


def net(layers: int) -> Graph:
    build = GraphBuilder()
    (value,) = build.add("images", "Placeholder", outputs=[64 * KIB])
    made = []
    for number in range(layers):
        size = (64 + 16 * (number % 5)) * KIB
        (value,) = build.add(
            f"layer_{number}", "Conv2D", inputs=[value], outputs=[size], workspace_bytes=9 * KIB
        )
        made.append(value)
    (slope,) = build.add("loss", "Mean", inputs=[value], outputs=[KIB])
    for number, value in reversed(list(enumerate(made))):
        (slope,) = build.add(f"slope_{number}", "ConvGrad", inputs=[value, slope], outputs=[32 * KIB])
    return build.build()


@pytest.mark.parametrize("policy", ["all", "auto"])
@pytest.mark.parametrize("room", [1.0, 1.3, 4.0])
def test_the_map_is_the_rehearsal_at_its_peak(policy: str, room: float) -> None:
    graph = net(12)
    config = LMSConfig(enabled=True, policy=policy, min_tensor_bytes=KIB, margin=0.0)
    made = plan(graph, config, limit_bytes=600 * KIB)
    demand = Demand.of(Buffers.of(graph), made.order, made.swaps)
    size = int(made.peak_bytes * room)
    found = map_pool(demand, size, pooled=False)
    run = Rehearsal(demand, size, pooled=False)
    for _ in range(steps_to_run(demand, STEPS)):
        run.step(grows=True)
    assert found.used == run.peak
    assert sum(chunk.nbytes for chunk in found.chunks) == found.used
    assert all(one.offset + one.nbytes <= two.offset for one, two in pairwise(found.chunks))
    assert found.used + sum(nbytes for _, nbytes in found.holes) == found.size >= size
    named = [chunk.tensor for chunk in found.chunks]
    assert None not in named and len(set(named)) == len(named)
    sizes = {stay.tensor: stay.nbytes for stay in demand.stays}
    assert all(chunk.nbytes >= sizes[chunk.tensor or 0] for chunk in found.chunks)


def test_a_noted_clock_runs_as_the_plain_one_and_keeps_its_copies() -> None:
    graph, costs = net(12), Costs()
    made = plan(graph, LMSConfig(enabled=True, policy="all", min_tensor_bytes=KIB))
    buffers, seconds = Buffers.of(graph), costs.op_seconds(graph)
    plain, noted = (
        clock(made.order, made.swaps, costs, seconds),
        NotedClock(positions(made.order), made.swaps, costs),
    )
    noted.pass_ops(made.order, seconds)
    assert made.swaps and noted.now_s == plain.now_s and noted.starts == plain.starts
    for copies, line in ((noted.copies_out, plain.out), (noted.copies_back, plain.back)):
        assert len(copies) == len(made.swaps)
        assert sum(end - begin for _, begin, end in copies) == pytest.approx(line.busy_s)
        assert all(one[2] <= two[1] + 1e-12 for one, two in pairwise(copies))
    stays = list(stays_in_time(buffers.timeline(made.order, made.swaps), noted))
    assert all(stay.begin_s <= stay.end_s <= noted.now_s for stay in stays)
    assert simulate(buffers, made.order, made.swaps, costs).peak_bytes >= max(stay.nbytes for stay in stays)
