from dataclasses import replace

import pytest

from lms.config import LMSConfig
from lms.ir.graph import GraphBuilder, Use
from lms.ir.liveness import Buffers, timeline
from lms.ir.swap_plan import Swap, SwapIn
from lms.schedule.schedule import Schedule, Trip
from lms.simulate.cost_model import Costs, costs_of
from lms.simulate.step_time import simulate
from lms.swaps.swap_planner import plan

KIB = 1024
COSTS = Costs(out_bytes_per_s=KIB, in_bytes_per_s=2 * KIB, copy_latency_s=0.0)
"""4 KiB take four seconds out and two back; ops take the seconds that each test gives them."""


def forward_and_back():
    build = GraphBuilder()
    (a,) = build.add("a", "Op", outputs=[4 * KIB])
    (b,) = build.add("b", "Op", inputs=[a], outputs=[KIB])
    (c,) = build.add("c", "Op", inputs=[b], outputs=[KIB])
    build.add("d", "Op", inputs=[c, a])
    return Buffers.of(build.build())


def run(seconds, trigger, blocks=()):
    swap = Swap(0, 4 * KIB, after=0, swap_ins=(SwapIn(trigger, (Use(3, 1),)),), blocks=blocks)
    return simulate(forward_and_back(), range(4), [swap], COSTS, seconds)


def test_copies_that_fit_beside_compute_cost_nothing():
    timing = run([1, 5, 5, 1], trigger=1)
    assert (timing.makespan_s, timing.stall_s, timing.slowdown) == (12, 0, 1.0)
    assert (timing.out_busy_s, timing.in_busy_s) == (4, 2)
    assert timing.starts_s == (0, 1, 6, 11)


def test_a_reader_waits_for_its_copy():
    # out 1..5; c ends at 11, back 11..13
    assert run([1, 5, 5, 1], trigger=2).starts_s == (0, 1, 6, 13)


def test_a_copy_back_waits_for_the_copy_out():
    # out 1..5, back 5..7 although b is done at 2
    assert run([1, 1, 1, 1], trigger=1).starts_s == (0, 1, 2, 7)


def test_an_op_that_needs_the_memory_waits_for_the_copy_out():
    timing = run([1, 1, 1, 1], trigger=2, blocks=(2,))
    # c waits until 5 and ends at 6; back 6..8
    assert timing.starts_s == (0, 1, 5, 8)
    assert timing.peak_bytes == 5 * KIB


def test_the_peak_in_time_counts_what_is_still_being_copied():
    assert run([1, 1, 1, 1], trigger=2).peak_bytes == 6 * KIB


def test_each_direction_carries_one_copy_at_a_time():
    build = GraphBuilder()
    a, b = build.add("ab", "Op", outputs=[2 * KIB, 2 * KIB])
    build.add("c", "Op")
    build.add("d", "Op", inputs=[b, a])
    swaps = [Swap(t, 2 * KIB, 0, (SwapIn(1, (Use(2, slot),)),)) for slot, t in enumerate((b, a))]
    timing = simulate(Buffers.of(build.build()), range(3), swaps, COSTS, [1, 1, 1])
    # out 1..3 and 3..5; back 3..4 and 5..6
    assert timing.starts_s == (0, 1, 6)


def test_costs_come_from_a_roofline_or_a_profile():
    build = GraphBuilder()
    (x,) = build.add("x", "Placeholder", outputs=[6 * 10**8])
    (y,) = build.add("copy", "Op", inputs=[x], outputs=[6 * 10**8])
    (z,) = build.add("view", "Reshape", inputs=[y], outputs=[6 * 10**8])
    build.add("math", "Conv2D", inputs=[z], outputs=[4], flops=9e12)
    build.add("tiny", "Op", outputs=[4])
    build.add("known", "Op", outputs=[4])
    seconds = Costs(profile_s={"known": 7.0}).op_seconds(build.build())
    assert seconds == pytest.approx((0, 0.002, 0, 1.0, 5e-6, 7.0))
    assert costs_of("CPU").flops_per_s < costs_of("GPU").flops_per_s


def test_kernels_of_a_gpu_reach_different_shares_of_its_rates() -> None:
    """Each op here would take a second at the full rates; seen on an H100."""
    build, large = GraphBuilder(), 5 * 10**8
    (x,) = build.add("x", "Placeholder", outputs=[large])
    (channels,) = build.add("channels", "Placeholder", outputs=[256])
    (one,) = build.add("one", "Placeholder", outputs=[4])
    (y,) = build.add("scaled", "Mul", inputs=[x, one], outputs=[large])
    build.add("relu", "Relu", inputs=[y], outputs=[large])
    build.add("repeats", "Mul", inputs=[y, channels], outputs=[large])
    build.add("to few", "Sum", inputs=[x, x], outputs=[256])
    build.add("to many", "Sum", inputs=[x], outputs=[large])
    build.add("conv", "Conv2D", inputs=[channels], outputs=[4], flops=1e9)
    build.add("conv3d", "Conv3DBackpropFilterV2", inputs=[channels], outputs=[4], flops=1e9)
    graph = build.build()
    costs = Costs(flops_per_s=1e9, device_bytes_per_s=1e9, has_shares=True)
    seconds = dict(zip([op.name for op in graph.ops], costs.op_seconds(graph), strict=True))
    wanted = {"scaled": 1, "relu": 1, "repeats": 1 / 0.55, "to few": 1 / 0.3, "to many": 1 / 0.8, "conv": 2}
    assert {name: seconds[name] for name in wanted} == pytest.approx(wanted, rel=1e-5)
    assert seconds["conv3d"] == 5.0
    assert replace(costs, has_shares=False).op_seconds(graph)[3:] == pytest.approx((1.0,) * 7, rel=1e-5)


def test_a_kernel_writes_over_a_copy_that_came_back_where_it_reads_it_last() -> None:
    """The product takes the copy that came back for it, although the sum reads another copy later."""
    build = GraphBuilder()
    (x,) = build.add("x", "Placeholder", outputs=[0])
    (made,) = build.add("made", "Conv2D", inputs=[x], outputs=[4096])
    (_,) = build.add("far", "Conv2D", inputs=[x], outputs=[256])
    (product,) = build.add("product", "Mul", inputs=[made, x], outputs=[4096])
    (_,) = build.add("between", "Conv2D", inputs=[product], outputs=[256])
    (_,) = build.add("sum", "Sum", inputs=[made], outputs=[256])
    graph = build.build()
    number = {op.name: op.id for op in graph.ops}

    def uses(reader: str) -> tuple[Use, ...]:
        return (Use(number[reader], 0),)

    swap_ins = (SwapIn(number["far"], uses("product")), SwapIn(number["between"], uses("sum")))
    swap = Swap(made, 4096, number["made"], swap_ins)
    buffers, order = Buffers.of(graph), tuple(range(len(graph.ops)))
    found = timeline(buffers, order, (swap,))
    assert found.handed_on == {product: made}
    assert found.allocated[2 * number["product"]] == 4096, "the product, in the copy's place"
    assert max(found.allocated[2 * number["made"] :]) < 2 * 4096
    later = swap._replace(swap_ins=(SwapIn(number["far"], (*uses("product"), *uses("sum"))),))
    assert timeline(buffers, order, (later,)).handed_on == {}, "the sum still reads this copy"


@pytest.mark.parametrize(("until", "at_once", "last"), [(2, True, 4), (3, False, 7)])
def test_a_copy_frees_its_buffer_at_once_where_no_op_holds_it(until: int, at_once: bool, last: int) -> None:
    """Made by op 0, read by op 1, and waited for by op 4 at the latest."""
    build = GraphBuilder()
    (x,) = build.add("x", "Conv2D", outputs=[4096])
    (y,) = build.add("y", "Conv2D", inputs=[x], outputs=[256])
    for name in "abcd":
        (y,) = build.add(name, "Conv2D", inputs=[y], outputs=[256])
    build.add("z", "Conv2D", inputs=[x, y])
    swap = Swap(x, 4096, 0, (SwapIn(5, (Use(6, 0),)),), (4,), until, at_once)
    stays = timeline(Buffers.of(build.build()), range(7), (swap,)).residencies
    first, back = (stay for stay in stays if stay.tensor == x)
    assert (first.first, first.last) == (0, last) and back.first == 11


@pytest.mark.parametrize("device_type", ["CPU", "GPU"])
def test_buffers_of_a_gpu_are_held_while_they_are_copied(device_type: str) -> None:
    """There the copy is done when the link has done with it, and another one would lie there in each step."""
    build = GraphBuilder()
    tensors = list(build.add("x", "Placeholder", outputs=[0]))
    for number in range(8):
        tensors += build.add(f"f{number}", "Conv2D", inputs=tensors[-1:], outputs=[1 << 20])
    made_last = tensors[-1]
    for number, tensor in reversed([*enumerate(tensors[1:])]):
        (made_last,) = build.add(f"b{number}", "Conv2D", inputs=[tensor, made_last], outputs=[256])
    config = LMSConfig(policy="budget", budget_bytes=5 << 20, margin=0.0, min_tensor_bytes=1)
    made = plan(build.build(), config, costs=costs_of(device_type))
    assert made.swaps and {swap.at_once for swap in made.swaps if swap.blocks} == {device_type == "CPU"}


@pytest.mark.parametrize(("freed", "last"), [(1, 1), (2, 2), (4, 2)])
def test_a_copy_is_done_when_the_next_step_is_or_when_that_begins_if_it_waits(freed: int, last: int) -> None:
    """Made by step 0; the copy ends no sooner than between the steps 0 and 1, where another may come back."""
    build = GraphBuilder()
    (x,) = build.add("x", "Conv2D", outputs=[4096])
    (y,) = build.add("y", "Conv2D", outputs=[256])
    for name in "abcd":
        (y,) = build.add(name, "Conv2D", inputs=[y], outputs=[256])
    build.add("z", "Conv2D", inputs=[x, y])
    buffers, order = Buffers.of(build.build()), range(7)
    schedule = Schedule.of(buffers, order, {*order}, [x], copies_at_once=True)
    swaps = schedule.swaps([Trip(x, 0, 6, trigger=5, freed=freed)])
    first, _ = (stay for stay in timeline(buffers, order, swaps).residencies if stay.tensor == x)
    assert (first.first, first.last) == (0, last)
