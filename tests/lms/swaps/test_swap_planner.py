"""Plans for small steps that can be worked out by hand. Sizes are in units of 256 bytes."""

from dataclasses import replace

import pytest

from lms.config import LMSConfig
from lms.ir.eligibility import EARLY, FLOATING
from lms.ir.graph import Graph, GraphBuilder, Use
from lms.ir.liveness import Buffers
from lms.ir.swap_plan import SerialEdge, SwapIn
from lms.planner.fragmentation import plan_in_pieces
from lms.planner.hybrid import decide
from lms.schedule.op_order import (
    big_ops,
    early_ops,
    executor_order,
    floating_ops,
    serial_edges,
    topological_levels,
    waits_for_device,
)
from lms.simulate.cost_model import Costs
from lms.simulate.executor import peaks_by_chance
from lms.simulate.step_time import simulate
from lms.swaps.case import Case
from lms.swaps.swap_planner import plan, plan_all, usable_bytes, wanted_levels

U = 256
FAST = Costs(launch_s=1.0, out_bytes_per_s=1e12, in_bytes_per_s=1e12, copy_latency_s=0.0)


def config(**fields):
    return LMSConfig(**{"min_tensor_bytes": U, "margin": 0.0} | fields)


def deep(depth=4, size=4):
    """f0 ... f(n-1), a loss, then b(n-1) ... b0, which read their f and the gradient: ops 1 to 2n + 1."""
    build = GraphBuilder()
    (images,) = build.add("images", "Placeholder", outputs=[U])
    values = [images]
    for index in range(depth):
        values += build.add(f"f{index}", "Conv2D", inputs=[values[-1]], outputs=[size * U])
    (gradient,) = build.add("loss", "Loss", inputs=[values[-1]], outputs=[U])
    for index in reversed(range(depth)):
        (gradient,) = build.add(f"b{index}", "ConvGrad", inputs=[values[index + 1], gradient], outputs=[U])
    return build.build(kept=[gradient])


def names(graph, swaps):
    return [graph.tensor_name(swap.tensor) for swap in swaps]


def test_auto_leaves_a_step_that_fits_alone_and_says_so():
    graph = deep()
    made = plan(graph, config(), limit_bytes=18 * U)
    assert made.is_empty and made.feasible and made.peak_bytes == made.peak_before_bytes == 18 * U
    assert made.notes == ("nothing is edited: the step fits (0.0 MiB)",)


def beside(count=5, size=10):
    """A chain of small ops, beside each of which a large buffer is made and read once."""
    build = GraphBuilder()
    (chained,) = build.add("images", "Placeholder", outputs=[U])
    ends = []
    for index in range(count):
        (large,) = build.add(f"large{index}", "Conv2D", inputs=[chained], outputs=[size * U])
        ends += build.add(f"small{index}", "ConvGrad", inputs=[large], outputs=[U])
        (chained,) = build.add(f"chained{index}", "Conv2D", inputs=[chained], outputs=[U])
    return build.build(kept=[*ends, chained])


@pytest.mark.parametrize(
    ("threads", "limit", "ordered"), [(1, 20, False), (2, 20, True), (2, 24, True), (2, 28, False)]
)
def test_a_step_that_fits_unless_its_ops_meet_gets_an_order(threads, limit, ordered):
    """One after the other its ops need 16; two threads make two large buffers, which need 26."""
    costs = replace(FAST, threads=threads)
    case = Case.of(beside(), config(), costs)
    assert case.peak_before_bytes == 16 * U
    made = plan_in_pieces(case, config(), limit * U)
    assert made.is_empty != ordered and made.feasible and not made.swaps
    assert None not in peaks_by_chance(case.buffers, made, costs, [limit * U])


def test_a_budget_that_is_barely_missed_is_told_in_bytes():
    missed = plan(deep(), config(policy="budget", budget_bytes=7 * U))
    assert not missed.feasible
    assert (
        f"the budget of {7 * U:,} bytes is not met: the step needs {missed.peak_bytes:,} bytes"
        in missed.notes[0]
    )


def test_what_is_open_is_said_where_the_rest_fits():
    build = GraphBuilder()
    (a,) = build.add("a", "Op", outputs=[4 * U])
    build.add("b", "Op", inputs=[a], outputs=[None])
    (note,) = plan(build.build(), config(), limit_bytes=18 * U).notes
    assert "what is known fits" in note and "the sizes of 1 tensors are open" in note


def test_auto_without_a_known_limit_edits_nothing_and_says_so():
    made = plan(deep(), config())
    assert made.is_empty and "no known limit" in made.notes[0]


def test_budget_moves_no_more_than_it_must_and_what_is_needed_last():
    graph = deep()
    made = plan(graph, config(policy="budget", budget_bytes=14 * U), costs=FAST)
    # 18 units at b3; one buffer of 4 has to go, and f0 is needed again last
    assert names(graph, made.swaps) == ["f0:0"]
    assert (made.bytes_out, made.bytes_in, made.peak_bytes) == (4 * U, 4 * U, 14 * U)
    (swap,) = made.swaps
    assert swap.blocks == (4,) and swap.after == 1  # f3 would be too much
    assert swap.until == 3, "and a copy that is done sooner leaves the memory as it was planned"
    assert swap.swap_ins[0].uses == (Use(9, 0),)
    assert set(made.rejected_by_reason) == {"not in the step's device memory", "not needed to fit"} | {
        "all its uses are neighbours",
        "output of the step",
    }


def test_a_budget_below_the_floor_says_what_the_floor_is_and_where():
    graph = deep()
    made = plan(graph, config(policy="budget", budget_bytes=5 * U), costs=FAST)
    assert not made.feasible
    assert made.floor_bytes == 8 * U and graph.ops[made.floor_op].name in {"f1", "f2", "f3"}
    assert "is not met" in made.notes[0] and "(at f" in made.notes[0]


def test_all_swaps_whatever_has_a_gap_just_in_time():
    graph = deep()
    made = plan(graph, config(policy="all"))
    assert names(graph, made.swaps) == ["f0:0", "f1:0", "f2:0"]  # f3's readers are neighbours
    assert made.peak_bytes == made.floor_bytes
    assert made.swaps[0].swap_ins == (SwapIn(trigger=8, uses=(Use(9, 0),)),)
    assert made.serial_edges == ()  # the net is a chain already


def test_all_hides_copies_beside_compute_where_that_takes_no_more_memory():
    """Policy all has each copy awaited at once first."""
    build = GraphBuilder()
    (images,) = build.add("images", "Placeholder", outputs=[U])
    forward = [build.add("wide", "Wide", inputs=[images], outputs=[12 * U])[0]]
    for number in range(6):
        forward += build.add(f"f{number}", "Conv", inputs=[forward[-1]], outputs=[2 * U])
    (gradient,) = build.add("loss", "Loss", inputs=[forward[-1]], outputs=[U])
    for number, read in reversed([*enumerate(forward)]):
        (gradient,) = build.add(f"b{number}", "ConvGrad", inputs=[gradient, read], outputs=[U])
    graph = build.build([gradient])
    costs = Costs(launch_s=1.0, out_bytes_per_s=2 * U, in_bytes_per_s=2 * U, copy_latency_s=0.0)
    made = plan(graph, config(policy="all"), costs=costs)
    case = Case.of(graph, config(policy="all"), costs)
    at_once = case.given.swaps(plan_all(case.given))
    waiting, beside = (
        simulate(case.buffers, order, swaps, costs)
        for order, swaps in ((case.given.order, at_once), (made.order, made.swaps))
    )
    assert made.peak_bytes <= case.buffers.timeline(case.given.order, at_once).peak_bytes
    assert beside.makespan_s < 0.95 * waiting.makespan_s


def test_all_leaves_out_short_trips_that_gain_nothing():
    build = GraphBuilder()
    (a,) = build.add("a", "Op", outputs=[4 * U])
    (b,) = build.add("b", "Op", inputs=[a], outputs=[U])
    (c,) = build.add("c", "Op", inputs=[b], outputs=[U])
    build.add("d", "Op", inputs=[c, a], outputs=[8 * U])  # 13 units here, with or without a trip of a
    made = plan(build.build(), config(policy="all"))
    assert made.swaps == () and made.peak_bytes == 13 * U


def test_all_keeps_what_the_host_cannot_hold():
    graph, everything = deep(depth=8), config(policy="all")
    least = plan_in_pieces(Case.of(graph, everything, Costs()), everything, None)
    room = least.bytes_out // 2
    made = plan_in_pieces(Case.of(graph, everything, Costs(host_room_bytes=room)), everything, None)
    assert room // 2 < made.bytes_out <= room and made.policy == "all"
    assert least.peak_bytes < made.peak_bytes < made.peak_before_bytes
    none = plan_in_pieces(Case.of(graph, everything, Costs(host_room_bytes=0)), everything, None)
    assert none == least, "nothing fits there: the transport refuses it and says what to try"


def test_what_the_host_holds_is_found_where_an_order_alone_saves_more():
    """Wide branches: ops in another order need less than half, without any swap."""
    build = GraphBuilder()
    (images,) = build.add("images", "Placeholder", outputs=[U])
    ends = []
    for branch in range(12):
        (wide,) = build.add(f"wide{branch}", "Conv2D", inputs=[images], outputs=[4 * U])
        (end,) = build.add(f"end{branch}", "Conv2D", inputs=[wide], outputs=[U])
        ends.append(end)
    (total,) = build.add("total", "ConcatV2", inputs=ends, outputs=[12 * U])
    (slope,) = build.add("slope", "Mul", inputs=[total], outputs=[U])
    for branch in range(12):
        (slope,) = build.add(f"back{branch}", "ConvGrad", inputs=[ends[branch], slope], outputs=[U])
    graph, everything = build.build(kept=[slope]), config(policy="all")
    least = plan_in_pieces(Case.of(graph, everything, Costs()), everything, None)
    for room in range(U, least.bytes_out, 2 * U):
        costs = Costs(host_room_bytes=room)
        held = [
            made
            for budget in range(least.peak_bytes, 2 * least.peak_bytes, U // 4)
            for made in [plan(graph, config(policy="budget", budget_bytes=budget), costs=costs)]
            if made.feasible and made.swaps and made.bytes_out <= room
        ]
        made = plan_in_pieces(Case.of(graph, everything, costs), everything, None)
        assert not held or made.bytes_out <= room, f"{len(held)} plans hold {room} bytes"


def test_what_the_host_cannot_hold_is_computed_again():
    graph = deep(depth=8)
    tight = config(policy="budget", budget_bytes=20 * U, recompute="auto")
    swapped = decide(graph, replace(tight, recompute="off"), "GPU", None, Costs()).plan
    assert swapped.feasible and swapped.bytes_out > 8 * U
    made = decide(graph, tight, "GPU", None, Costs(host_room_bytes=8 * U)).plan
    assert made.feasible and made.bytes_out <= 8 * U and made.recomputed.tensors > 0


def test_margin_and_excluded_bytes_come_off_the_budget():
    assert usable_bytes(config(margin=0.25, exclude_bytes=200), 1000) == 600
    assert usable_bytes(config(policy="budget", budget_bytes=10), 1000) == 10
    assert usable_bytes(config(policy="budget", budget_bytes=2000), 1000) == 1000, "the device has no more"
    assert usable_bytes(config(budget_bytes=10), 1000) == usable_bytes(config(budget_bytes=10), None) == 10
    assert usable_bytes(config(), None) is None
    assert usable_bytes(config(exclude_bytes=2000), 1000) == 0


def test_ops_run_in_an_order_that_frees_memory_where_that_is_enough():
    build = GraphBuilder()
    (x,) = build.add("x", "Op", outputs=[U])
    wide = [build.add(f"wide{i}", "Op", inputs=[x], outputs=[8 * U])[0] for i in range(4)]
    small = [build.add(f"small{i}", "Op", inputs=[w], outputs=[U])[0] for i, w in enumerate(wide)]
    build.add("end", "Op", inputs=small)
    made = plan(build.build(), config(), limit_bytes=14 * U)
    assert made.peak_before_bytes == 33 * U and made.peak_bytes == 12 * U
    assert made.swaps == () and SerialEdge(5, 2) in made.serial_edges
    assert made.feasible


def test_collectives_and_what_depends_on_them_stay_out_of_the_chain():
    build = GraphBuilder()
    (a,) = build.add("a", "Op", outputs=[4 * U])
    (b,) = build.add("b", "Op", inputs=[a], outputs=[4 * U])
    (c,) = build.add("reduce", "HorovodAllreduce", inputs=[b], outputs=[4 * U])
    build.add("update", "ResourceApply", inputs=[c])
    (d,) = build.add("d", "Op", inputs=[b], outputs=[4 * U])
    (e,) = build.add("e", "Op", inputs=[d], outputs=[4 * U])
    (e,) = build.add("e2", "Op", inputs=[e], outputs=[4 * U])
    build.add("f", "Op", inputs=[e, a])
    build.add("g", "Op", outputs=[4 * U])
    graph = build.build()
    assert floating_ops(graph) == {2, 3}
    made = plan(graph, config(policy="all"))
    touched = {op for edge in made.serial_edges for op in (edge.before, edge.after)}
    assert touched and not touched & {2, 3}
    assert names(graph, made.swaps) == ["a:0"]
    assert made.rejected_by_reason[FLOATING] == 2


def test_an_alias_of_a_swapped_buffer_is_redirected_too():
    build = GraphBuilder()
    (a,) = build.add("a", "Op", outputs=[4 * U])
    (view,) = build.add("view", "Reshape", inputs=[a], outputs=[4 * U])
    (b,) = build.add("b", "Op", outputs=[U])
    (c,) = build.add("c", "Op", inputs=[b], outputs=[U])
    build.add("d", "Op", inputs=[c, view, a])
    (swap,) = plan(build.build(), config(policy="all")).swaps
    assert swap.tensor == a and swap.swap_ins[0].uses == (Use(4, 1), Use(4, 2))


def test_a_buffer_that_a_view_reads_beside_its_own_stays():
    build = GraphBuilder()
    (a,) = build.add("a", "Op", outputs=[4 * U])
    (b,) = build.add("b", "Op", outputs=[4 * U])
    for index in range(5):
        (b,) = build.add(f"b{index}", "Op", inputs=[b], outputs=[4 * U])
    build.add("view", "Reshape", inputs=[b, a], outputs=[4 * U])
    made = plan(build.build(), config(policy="all"))
    assert made.swaps == () and made.rejected_by_reason["read by an op that passes another buffer on"] == 1


def test_paths_through_a_view_count_only_from_what_it_shows():
    build = GraphBuilder()
    (a,) = build.add("a", "Op", outputs=[4 * U])
    (b,) = build.add("b", "Op", outputs=[4 * U])
    view, _ = build.add("views", "IdentityN", inputs=[a, b], outputs=[4 * U, 4 * U])
    build.add("c", "Op", inputs=[view])
    graph = build.build()
    # were c sent to a copy of a, nothing but this edge would keep it behind b
    assert serial_edges(graph, range(4), (0, 1, 3)) == (SerialEdge(0, 1), SerialEdge(1, 3))


def test_paths_through_a_merge_count_only_where_all_its_inputs_have_them():
    build = GraphBuilder()
    (a,) = build.add("a", "Op", outputs=[4 * U])
    (b,) = build.add("b", "Op", outputs=[4 * U])
    (long,) = build.add("long", "Op", inputs=[b], outputs=[4 * U])
    (merged, _) = build.add("merged", "Merge", inputs=[a, long], outputs=[4 * U, U])
    build.add("c", "Op", inputs=[merged])
    # c runs once a has come: nothing but this edge would keep it behind b
    edges = (SerialEdge(0, 1), SerialEdge(1, 4))
    assert serial_edges(build.build(), range(5), (0, 1, 4)) == edges


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"forbidden": "mine"}, "mine"),
        ({"outputs": [None]}, "size is unknown"),
        ({"outputs": [U - 1]}, "smaller than min_tensor_bytes"),
        ({"outside": True}, "not in the step's device memory"),
    ],
)
def test_every_refusal_has_its_reason(change, reason):
    build = GraphBuilder()
    (a,) = build.add("a", "Op", **{"outputs": [4 * U]} | change)
    (b,) = build.add("b", "Op", outputs=[4 * U])
    (c,) = build.add("c", "Op", inputs=[b], outputs=[4 * U])
    build.add("d", "Op", inputs=[c, a])
    made = plan(build.build(), config(policy="all"))
    assert made.swaps == () and made.rejected_by_reason[reason] == 1


# --- thresholds
# -------------------------------------------------------------------------------------------------------


def threshold(graph, **fields):
    return plan(graph, config(policy="threshold", **fields), costs=FAST)


def test_threshold_is_a_distance_in_levels():
    graph = deep()
    # distances to the next use, in levels: 7, 5, 3 (f3 has its readers next to it)
    assert names(graph, threshold(graph, swapout_threshold=4, swapin_ahead=2).swaps) == ["f0:0", "f1:0"]
    assert names(graph, threshold(graph, swapout_threshold=7, swapin_ahead=2).swaps) == []


@pytest.mark.parametrize(("ahead", "trigger"), [(1, 8), (3, 6), (100, 3)])
def test_ahead_moves_the_trigger_but_never_before_the_copy_out(ahead, trigger):
    graph = deep()
    swap = threshold(graph, swapout_threshold=5, swapin_ahead=ahead).swaps[0]
    assert swap.swap_ins[0].trigger == trigger


def test_ub_bounds_how_far_ahead_a_copy_starts():
    build = GraphBuilder()
    (kept,) = build.add("kept", "Conv2D", inputs=build.add("x", "Placeholder", outputs=[U]), outputs=[4 * U])
    (value,) = build.add("near", "Conv2D", inputs=[kept], outputs=[4 * U])
    for level in range(40):  # too small to be steps: many levels without a trigger
        (value,) = build.add(f"cast{level}", "Op", inputs=[value], outputs=[8])
    (late,) = build.add("late", "Conv2D", inputs=[value], outputs=[4 * U])
    build.add("g/gradients/bkept", "ConvGrad", inputs=[kept, late], outputs=[U])
    graph = build.build()

    def trigger(ub):
        made = threshold(graph, lb=5, ub=ub, min_tensor_bytes=2 * U)
        swap = next(swap for swap in made.swaps if swap.tensor == kept)
        return graph.ops[swap.swap_ins[0].trigger].name

    assert (trigger(10000), trigger(30)) == ("cast0", "late")


def test_sync_mode_makes_neighbours_wait():
    graph = deep()
    swap = threshold(graph, swapout_threshold=6, swapin_ahead=2, sync_mode=3).swaps[0]
    assert swap.blocks == (3,) and swap.swap_ins[0].blocks == (8,)
    swap = threshold(graph, swapout_threshold=6, swapin_ahead=2, sync_mode=0).swaps[0]
    assert swap.blocks == () and swap.swap_ins[0].blocks == ()


def readers_apart():
    build = GraphBuilder()
    (a,) = build.add("a", "Op", outputs=[4 * U])
    value = a
    for index in range(8):
        (value,) = build.add(
            f"op{index}", "Op", inputs=[value, a] if index in (4, 7) else [value], outputs=[U]
        )
    return build.build()


@pytest.mark.parametrize(("groupby", "copies"), [(1, 2), (3, 1)])
def test_groupby_lets_close_readers_share_a_copy(groupby, copies):
    (swap,) = threshold(readers_apart(), swapout_threshold=2, swapin_groupby=groupby, swapin_ahead=1).swaps
    assert len(swap.swap_ins) == copies


def test_open_parameters_are_tuned_to_the_limit():
    graph = deep(depth=8)
    made = plan(graph, config(policy="threshold"), limit_bytes=21 * U, costs=FAST)
    timing = simulate(Buffers.of(graph), made.order, made.swaps, FAST)
    assert timing.peak_bytes <= 21 * U and made.notes[0].startswith("threshold ")
    assert len(made.swaps) < 7


def test_serialization_names_levels():
    graph = deep()
    levels, buffers = topological_levels(graph), Buffers.of(graph)
    assert wanted_levels(config(serialization=("1", "3:5", "8:")), buffers, levels) == {1, 3, 4, 8, 9}
    assert wanted_levels(config(serialization_by_size=3.5 * U / 2**30), buffers, levels) == {1, 2, 3, 4}
    assert wanted_levels(config(), buffers, levels) == frozenset()


def test_the_ops_of_a_level_run_one_after_the_other():
    build = GraphBuilder()
    (x,) = build.add("x", "Op", outputs=[U])
    wide = [build.add(f"wide{i}", "Op", inputs=[x], outputs=[8 * U])[0] for i in range(3)]
    build.add("end", "Op", inputs=wide)
    made = threshold(build.build(), swapout_threshold=9, serialization=("1",))
    assert made.serial_edges == (SerialEdge(1, 2), SerialEdge(2, 3))


def test_beside_named_levels_a_plan_foresees_the_order_of_an_executor():
    """Two branches that the graph gives one after the other, and an executor runs side by side."""
    build, mib = GraphBuilder(), 2**20
    (x,) = build.add("x", "Op", outputs=[mib])
    ends = []
    for branch in "ab":
        (value,) = build.add(f"{branch}0", "Op", inputs=[x], outputs=[8 * mib])
        ends += build.add(f"{branch}1", "Op", inputs=[value], outputs=[mib])
    build.add("end", "Op", inputs=ends)
    graph = build.build()
    chained = threshold(graph, swapout_threshold=9)
    assert not chained.swaps and chained.peak_bytes == 10 * mib
    named = threshold(graph, swapout_threshold=9, serialization=("3",))
    assert named.serial_edges == () and named.order == executor_order(graph)
    assert named.peak_bytes == 17 * mib
    assert named.notes[0] == "without named levels the step would need 10.0 MiB, not 17.0 MiB"
    in_order = threshold(graph, swapout_threshold=9, serialization=("1:3",))
    assert in_order.peak_bytes == 10 * mib and "named levels" not in str(in_order.notes)


def test_beside_named_levels_a_copy_back_still_waits_for_its_trigger():
    graph = deep()
    named = threshold(graph, swapout_threshold=6, swapin_ahead=2, sync_mode=3, serialization=("1",))
    place = {op: place for place, op in enumerate(named.order)}
    (swap,) = named.swaps
    (back,) = swap.swap_ins
    assert SerialEdge(swap.after, back.trigger) in named.serial_edges
    assert {edge.after for edge in swap.edges if edge.before == swap.after} == set(swap.blocks)
    assert {use.op for use in back.uses} <= {e.after for e in swap.edges if e.before == back.trigger}
    assert all(place[edge.before] < place[edge.after] for edge in (*named.serial_edges, *swap.edges))
    assert not any("named levels" in note for note in named.notes)


def test_beside_named_levels_a_buffer_is_held_until_the_op_that_the_plan_says():
    """Here levels put ``d``, which the buffer of ``b`` outlives, behind ``e``, which waits for its copy."""
    build = GraphBuilder()
    (a,) = build.add("a", "Op", outputs=[U])
    (b,) = build.add("b", "Op", inputs=[a], outputs=[U])
    (c,) = build.add("c", "Op", inputs=[b, a], outputs=[U])
    build.add("d", "Op", inputs=[b, a], outputs=[U])
    (e,) = build.add("e", "Op", inputs=[c], outputs=[U])
    build.add("f", "Op", inputs=[e, b], outputs=[U])
    graph = build.build()
    made = threshold(
        graph, swapout_threshold=1, swapin_groupby=0, swapin_ahead=1, sync_mode=1, serialization=("2",)
    )
    place = {op: place for place, op in enumerate(made.order)}
    (swap,) = [swap for swap in made.swaps if swap.until is not None]
    assert all(place[swap.until] < place[op] for op in swap.blocks)


def test_first_generation_swaps_from_forward_to_backward_only_unless_told():
    build = GraphBuilder()
    (a,) = build.add("a", "Op", outputs=[4 * U])
    (shape,) = build.add("gradients/shape", "Const", outputs=[8])  # TensorFlow keeps one of equal constants
    values = build.add("f0", "Op", inputs=[a, shape], outputs=[4 * U])
    for index in range(1, 5):
        values += build.add(f"f{index}", "Op", inputs=[values[-1]], outputs=[4 * U])
    values += build.add("still", "StopGradient", inputs=[values[-1]], outputs=[4 * U], aliases=[None])
    (skip,) = build.add("skip", "Op", inputs=[values[-1], values[0]], outputs=[4 * U])
    build.add("b0", "OpGrad", inputs=[skip, values[1]])
    graph = build.build()
    assert names(graph, threshold(graph, lb=2).swaps) == ["f1:0"]
    assert names(graph, threshold(graph, lb=2, swap_branches=True).swaps) == ["f0:0", "f1:0"]
    assert names(graph, threshold(graph, lb=2, swap_branches=True, branch_threshold=9).swaps) == ["f1:0"]
    off = threshold(graph, lb=2, n_tensors=0)
    assert off.is_empty and off.policy == "threshold" and "n_tensors is 0" in off.notes[0]
    direct = threshold(graph, lb=3, ctrld_strategy="direct_order").swaps[0]
    assert direct.swap_ins[0].trigger == 6


def layers_of_two_backward_ops():
    """f0 ... f4, then for each layer a ``b`` that reads what its f made, and a ``c`` that goes on from it."""
    build = GraphBuilder()
    (value,) = build.add("images", "Placeholder", outputs=[U])
    made = []
    for index in range(5):
        made += [value := build.add(f"f{index}", "Conv2D", inputs=[value], outputs=[4 * U])[0]]
    (gradient,) = build.add("loss", "Loss", inputs=[value], outputs=[4 * U])
    for index in reversed(range(5)):
        (gradient,) = build.add(f"b{index}", "ConvGrad", inputs=[made[index], gradient], outputs=[4 * U])
        (gradient,) = build.add(f"c{index}", "ReluGrad", inputs=[gradient], outputs=[4 * U])
    return build.build(kept=[gradient])


@pytest.mark.parametrize(
    ("fields", "trigger"),
    [
        ({"lb": 1}, "b1"),
        ({"lb": 2}, "b2"),
        ({"lb": 3}, "b3"),
        ({"lb": 2, "ctrld_strategy": "direct_order"}, "b1"),
        ({"lb": 9}, "loss"),  # no op of the forward pass is so far: nine levels ahead
    ],
)
def test_chain_rule_takes_the_backward_op_of_an_op_further_on(fields, trigger):
    graph = layers_of_two_backward_ops()
    made = threshold(graph, branch_threshold=1, **fields)
    swap = next(swap for swap in made.swaps if graph.tensor_name(swap.tensor) == "f0:0")
    assert graph.ops[swap.swap_ins[0].trigger].name == trigger


def test_chain_rule_looks_no_further_than_ub():
    graph = layers_of_two_backward_ops()
    chain = replace(graph, ops=tuple(op._replace(type="Op") for op in graph.ops))
    nobody = threshold(chain, lb=1, ub=2, branch_threshold=1)
    assert nobody.swaps == ()  # nothing says which ops belong to the backward pass
    told = replace(chain, backward=frozenset(op.id for op in chain.ops if op.name[0] in "bc"))
    swap = threshold(told, lb=1, ub=1, branch_threshold=1).swaps[0]
    assert chain.ops[swap.swap_ins[0].trigger].name == "b1"


# --- the whole
# --------------------------------------------------------------------------------------------------------


def test_the_executor_runs_what_is_ready_first():
    build = GraphBuilder()
    (a,) = build.add("a", "Op", outputs=[U])
    build.add("b", "Op", inputs=[a])
    build.add("c", "Op")
    assert executor_order(build.build()) == (0, 2, 1)


def reduced(layers: int, reduce: str, *, elsewhere: bool) -> Graph:
    """A chain of gradients on a GPU, each summed with another's and added to a variable."""
    build = GraphBuilder()
    (slope,) = build.add("loss", "Op", outputs=[U])
    for number in range(layers):
        (gradient,) = build.add(f"gradient{number}", "Op", inputs=[slope], outputs=[4 * U])
        (slope,) = build.add(f"slope{number}", "Op", inputs=[slope], outputs=[U])
        (total,) = build.add(
            f"sum{number}", reduce, inputs=[gradient], outputs=[4 * U], elsewhere=elsewhere, in_place=()
        )
        build.add(f"update{number}", "ResourceApply", inputs=[total])
    return build.build()


@pytest.mark.parametrize(("reduce", "elsewhere"), [("AddN", True), ("HorovodAllreduce", False)])
def test_gradients_pile_up_on_a_device_that_runs_behind_the_host(reduce: str, elsewhere: bool) -> None:
    """The host has launched the whole backward pass before the device has come to the first sum."""
    graph = reduced(8, reduce, elsewhere=elsewhere)
    ahead, behind = (
        Case.of(graph, config(), Costs(overlaps=overlaps)).peak_before_bytes for overlaps in (True, False)
    )
    assert ahead >= 8 * 4 * U > 2 * behind


def test_waits_are_counted_where_the_device_must_have_come_to_what_is_read() -> None:
    build = GraphBuilder()
    (batch,) = build.add("batch", "IteratorGetNext", outputs=[U], elsewhere=True)
    (made,) = build.add("made", "Op", inputs=[batch], outputs=[U])
    (shape,) = build.add("shape", "Op", inputs=[made], outputs=[8], outside=True)
    (size,) = build.add("size", "Op", inputs=[shape], outputs=[8], outside=True, elsewhere=True)
    build.add("scaled", "Op", inputs=[made, size], outputs=[U])
    (sent,) = build.add("sent", "Op", inputs=[made], outputs=[U], elsewhere=True)
    (back,) = build.add("back", "Op", inputs=[sent], outputs=[U])
    (all_ranks,) = build.add("all_ranks", "HorovodAllreduce", inputs=[back], outputs=[U])
    build.add("update", "ResourceApply", inputs=[all_ranks])
    graph = build.build()
    waits = dict(zip((op.name for op in graph.ops), waits_for_device(graph), strict=True))
    assert [waits[name] for name in ("batch", "made", "shape", "size", "scaled")] == [0, 1, 1, 1, 1]
    assert [waits[name] for name in ("sent", "back", "all_ranks", "update")] == [2, 3, 3, 4]


@pytest.mark.parametrize("policy", ["auto", "all", "threshold"])
def test_an_empty_graph_and_one_without_memory_have_empty_plans(policy):
    for count in (0, 3):
        build = GraphBuilder()
        for index in range(count):
            build.add(f"op{index}", "Op")
        made = plan(build.build(), config(policy=policy), limit_bytes=1)
        assert made.is_empty and made.feasible


def test_the_same_input_gives_the_same_plan():
    for policy in ("all", "threshold", "auto"):
        first, second = (plan(deep(9), config(policy=policy), limit_bytes=20 * U) for _ in range(2))
        assert repr(first) == repr(second)
        assert replace(first) == second


def test_ops_without_memory_are_in_no_order_however_small_a_tensor_may_be():
    graph = deep()
    made = plan(graph, config(policy="all", min_tensor_bytes=0), costs=FAST)
    assert 0 not in {op for edge in made.serial_edges for op in (edge.before, edge.after)}
    assert 0 not in {swap_in.trigger for swap in made.swaps for swap_in in swap.swap_ins}
    assert big_ops(Buffers.of(graph), 0, ()) == frozenset(range(1, len(graph.ops)))


def decaying(update):
    """A step with weight decay: ``decay`` and ``update`` need no batch, which ``next`` may not find."""
    build = GraphBuilder()
    (weight,) = build.add("weight", "ReadVariableOp", outputs=[4 * U])
    (batch,) = build.add("next", "IteratorGetNext", outputs=[4 * U])
    (decay,) = build.add("decay", "Mul", inputs=[weight], outputs=[4 * U])
    values = [batch]
    for index in range(4):
        values += build.add(f"f{index}", "Conv2D", inputs=[values[-1]], outputs=[4 * U])
    build.add("update", update, inputs=[decay], outputs=[])
    gradient = values[-1]
    for value in reversed(values):
        (gradient,) = build.add("grad", "ConvGrad", inputs=[value, gradient], outputs=[4 * U])
    return build.build(kept=[gradient])


def test_what_runs_without_a_batch_does_not_wait_for_one():
    graph = decaying("AssignSubVariableOp")
    assert {graph.ops[op].name for op in early_ops(graph)} == {"weight", "decay", "update"}
    made = plan(graph, config(policy="all"))
    assert not made.is_empty
    waiting = {edge.after for edge in made.serial_edges}
    waiting |= {op for swap in made.swaps for op in swap.blocks}
    assert waiting.isdisjoint(early_ops(graph))
    assert [graph.ops[op].name for op in made.order[:1]] == ["weight"]
    assert EARLY in {one.reason for one in made.rejected}


def test_a_step_without_an_iterator_or_an_update_has_no_early_ops():
    assert early_ops(decaying("Sigmoid")) == frozenset()
    assert early_ops(deep()) == frozenset()


def test_all_takes_one_buffer_more_for_copies_under_way_where_the_device_has_it():
    """Each copy takes as long as its op: with room for one more it runs beside the next op."""
    graph = deep(depth=6)
    costs = replace(FAST, out_bytes_per_s=4.0 * U, in_bytes_per_s=4.0 * U)
    least = plan(graph, config(policy="all"), costs=costs)
    roomy = plan(graph, config(policy="all"), limit_bytes=24 * U, costs=costs)
    alike = plan(graph, config(policy="all"), limit_bytes=24 * U, costs=replace(costs, overlaps=False))

    def seconds(made):
        return simulate(Buffers.of(graph), made.order, made.swaps, costs).makespan_s

    assert least.peak_bytes < roomy.peak_bytes <= least.peak_bytes + 4 * U
    assert seconds(roomy) < 0.8 * seconds(least)
    assert alike.peak_bytes == least.peak_bytes, "on a device whose copies run beside nothing"
    assert plan(graph, config(policy="all"), limit_bytes=least.peak_bytes, costs=costs).feasible
