"""A planned step as plain values: its memory over time, its copies, its peak, its pool and other policies."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from lms.config import LMSConfig
from lms.ir.graph import Graph
from lms.ir.liveness import Buffers, Timeline, positions, round_up, timeline
from lms.ir.op_traits import AGAIN
from lms.ir.swap_plan import SerialEdge, Swap
from lms.planner.hybrid import decide
from lms.report.stats import Planned
from lms.schedule.op_order import executor_order
from lms.simulate.allocation_trace import Demand
from lms.simulate.cost_model import Costs
from lms.simulate.pool_map import map_pool
from lms.simulate.step_time import NotedClock, Stay, StreamedCopies, simulate, stays_in_time
from lms.simulate.streams import closest
from lms.swaps.case import Case
from lms.swaps.swap_planner import plan_case

MOST_BANDS = 48
"""The tensors that are told by name over time; all others are summed up."""
MOST_POINTS = 240
"""The points of that sum."""
MOST_COPIES = 200
"""The copies of each direction."""
MOST_AT_PEAK = 120
MOST_CHUNKS = 200
POLICIES_S = 1.5
"""How long other policies are planned for comparison."""
MOST_OPS = 12_000
"""A step of more ops is not planned again for that."""
SHARES = (0.9, 0.75, 0.6, 0.5, 0.4, 0.3)
"""The budgets that policy ``budget`` is compared at, as shares of the unedited step's peak."""

KEPT, SWAPPED, RECOMPUTED, SCRATCH = "kept", "swapped", "recomputed", "scratch"


def describe_step(planned: Planned, limit_bytes: int | None, config: LMSConfig | None) -> dict[str, Any]:
    """Describe a planned step.

    Args:
        planned: The step and its plan.
        limit_bytes: Of the device.
        config: What was asked for; without it no other policies are planned.
    """
    tensors = _Tensors(planned)
    unedited, plan = planned.unedited, planned.plan
    order = closest(unedited, executor_order(unedited, ahead=planned.costs.overlaps))
    before = _side(unedited, order, (), (), planned.costs, tensors)
    after = _side(planned.graph, plan.order, plan.swaps, plan.serial_edges, planned.costs, tensors)
    return {
        "name": planned.name,
        "ops": len(planned.plan.order),
        "policy": planned.plan.policy,
        "base_bytes": planned.base_bytes,
        "limit_bytes": limit_bytes,
        "budget_bytes": planned.plan.budget_bytes,
        "floor_bytes": planned.plan.floor_bytes,
        "peak_before_bytes": planned.plan.peak_before_bytes,
        "peak_bytes": planned.plan.peak_bytes,
        "host_variables_bytes": planned.host_bytes,
        "open_sizes": None if planned.open_sizes is None else str(planned.open_sizes),
        "before": before,
        "after": after,
        "at_peak": _at_peak(planned, tensors),
        "pool": _pool(planned, limit_bytes, tensors),
        "policies": _policies(planned, config),
        "tensors": tensors.rows,
    }


class _Tensors:
    """Numbers the tensors that are told by name, by the graph that they are of."""

    def __init__(self, planned: Planned) -> None:
        self._planned = planned
        self.rows: list[list[Any]] = []
        """Name, op type, shape, bytes, fate, why."""
        self._numbers: dict[str, int] = {}
        graph = planned.graph
        self._swaps = {graph.tensor_name(swap.tensor): swap for swap in planned.plan.swaps}
        repeated = [op.name for op in graph.ops if _repeats(op.name) is not None]
        self._dropped = {_repeats(name) for name in repeated}
        self._reasons = {
            graph.tensor_name(rejected.tensor): rejected.reason for rejected in planned.plan.rejected
        }

    def number(self, graph: Graph, tensor: int) -> int:
        """Return the number of a tensor; a negative one is the scratch of an op."""
        if tensor < 0:
            op = graph.ops[-1 - tensor]
            row = [op.name, op.type, "", round_up(op.workspace_bytes), SCRATCH, "while its kernel runs"]
            return self._put(f"{op.name} {SCRATCH}", row)
        name, op = graph.tensor_name(tensor), graph.ops[graph.tensors[tensor].op]
        fate, why = self._fate(name, op.name)
        shapes = self._planned.shapes
        shape = shapes.get(name) or shapes.get(name.replace(f"/{AGAIN}:", ":"), "")
        return self._put(name, [name, op.type, shape, graph.tensors[tensor].nbytes, fate, why])

    def _put(self, key: str, row: list[Any]) -> int:
        if key not in self._numbers:
            self._numbers[key] = len(self.rows)
            self.rows.append(row)
        return self._numbers[key]

    def _fate(self, name: str, op_name: str) -> tuple[str, str]:
        if (swap := self._swaps.get(name)) is not None:
            return SWAPPED, self._trips(swap)
        if _repeats(op_name) is not None:
            return RECOMPUTED, f"a second copy, made again by {op_name}"
        if op_name in self._dropped:
            return RECOMPUTED, "dropped after its last use in the forward pass, and made again"
        return KEPT, self._reasons.get(name, "no reason is known")

    def _trips(self, swap: Swap) -> str:
        ops = self._planned.graph.ops
        back = ", ".join(ops[trip.trigger].name for trip in swap.swap_ins[:3])
        return f"out after {ops[swap.after].name}, back after {back}"


def _repeats(op_name: str) -> str | None:
    """Return the op that an op repeats, or None."""
    return op_name.removesuffix(f"/{AGAIN}") if op_name.endswith(f"/{AGAIN}") else None


def _short(seconds: float) -> float:
    return float(f"{seconds:.6g}")


def _side(
    graph: Graph,
    order: tuple[int, ...],
    swaps: tuple[Swap, ...],
    edges: tuple[SerialEdge, ...],
    costs: Costs,
    tensors: _Tensors,
) -> dict[str, Any]:
    """Describe the memory of a step over time, with or without its swaps."""
    buffers, seconds = Buffers.of(graph), costs.op_seconds(graph)
    clock = NotedClock(positions(order), swaps, costs, StreamedCopies.of(graph, edges))
    clock.pass_ops(order, seconds)
    stays = [*stays_in_time(timeline(buffers, order, swaps), clock), *_scratch(graph, order, clock)]
    by_worth = sorted(stays, key=lambda stay: -stay.nbytes * (stay.end_s - stay.begin_s))
    chosen = {stay.tensor for stay in by_worth[:MOST_BANDS]}
    named = [stay for stay in stays if stay.tensor in chosen]
    rest = [stay for stay in stays if stay.tensor not in chosen]
    curve = _sum_over_time(stays)
    peak = max(curve, key=lambda point: point[1], default=(0.0, 0))
    return {
        "seconds": _short(clock.now_s),
        "compute_s": _short(sum(seconds[op] for op in order)),
        "peak_bytes": peak[1],
        "peak_s": _short(peak[0]),
        "stays": [
            [tensors.number(graph, stay.tensor), _short(stay.begin_s), _short(stay.end_s)] for stay in named
        ],
        "rest": _thinned(_sum_over_time(rest)),
        "rest_count": len({stay.tensor for stay in rest}),
        "curve": _thinned(curve),
        "busy": _joined((clock.starts[op], clock.ends[op]) for op in order),
        "out": _copies(clock.copies_out, graph, tensors),
        "in": _copies(clock.copies_back, graph, tensors),
        "copies_left_out": sum(
            max(0, len(copies) - MOST_COPIES) for copies in (clock.copies_out, clock.copies_back)
        ),
        "out_busy_s": _short(sum(end - begin for _, begin, end in clock.copies_out)),
        "in_busy_s": _short(sum(end - begin for _, begin, end in clock.copies_back)),
    }


def _scratch(graph: Graph, order: Sequence[int], clock: NotedClock) -> Iterable[Stay]:
    for place, op in enumerate(order):
        if nbytes := round_up(graph.ops[op].workspace_bytes):
            yield Stay(-1 - op, nbytes, clock.starts[op], clock.ends[op], 2 * place, 2 * place)


def _sum_over_time(stays: Iterable[Stay]) -> list[tuple[float, int]]:
    """Return the points at which the sum of the stays changes, each with the most that it reaches there."""
    events: list[tuple[float, int, int]] = []
    for stay in stays:
        events += [
            (stay.begin_s, 2 * stay.first, stay.nbytes),
            (stay.end_s, 2 * stay.last + 1, -stay.nbytes),
        ]
    live, points = 0, [(0.0, 0)]
    for when_s, _, nbytes in sorted(events):
        live += nbytes
        points.append((when_s, live))
    return points


def _thinned(points: Sequence[tuple[float, int]]) -> list[list[float]]:
    """Thin a curve so that its highest points stay: the highest, and the last, of each stretch of time."""
    end = points[-1][0] if points else 0.0
    if len(points) <= MOST_POINTS or not end:
        return [[_short(when_s), nbytes] for when_s, nbytes in points]
    kept: list[list[float]] = []
    stretch: list[tuple[float, int]] = []
    slots, slot = MOST_POINTS // 2, 0
    for point in [*points, (end * 2, 0)]:
        at = min(int(point[0] / end * slots), slots - 1) if point[0] <= end else slots
        if at != slot and stretch:
            highest = max(stretch, key=lambda one: one[1])
            kept += [
                [_short(one[0]), one[1]] for one in sorted({highest, stretch[-1]}, key=lambda one: one[0])
            ]
            stretch, slot = [], at
        stretch.append(point)
    return kept


def _joined(spans: Iterable[tuple[float, float]]) -> list[list[float]]:
    """Join spans of work that follow on each other; the longest gaps between them stay."""
    joined: list[list[float]] = []
    for begin_s, end_s in spans:
        if end_s <= begin_s:
            continue
        if joined and begin_s - joined[-1][1] <= 1e-9:
            joined[-1][1] = end_s
        else:
            joined.append([begin_s, end_s])
    while len(joined) > MOST_COPIES:
        gaps = sorted(later[0] - earlier[1] for earlier, later in zip(joined, joined[1:], strict=False))
        least = gaps[len(gaps) // 2]
        wider: list[list[float]] = []
        for span in joined:
            if wider and span[0] - wider[-1][1] <= least:
                wider[-1][1] = span[1]
            else:
                wider.append(span)
        joined = wider
    return [[_short(begin_s), _short(end_s)] for begin_s, end_s in joined]


def _copies(copies: Sequence[tuple[int, float, float]], graph: Graph, tensors: _Tensors) -> list[list[float]]:
    longest = sorted(copies, key=lambda copy: copy[1] - copy[2])[:MOST_COPIES]
    return [
        [tensors.number(graph, tensor), _short(begin_s), _short(end_s)]
        for tensor, begin_s, end_s in sorted(longest, key=lambda copy: copy[1])
    ]


def _at_peak(planned: Planned, tensors: _Tensors) -> dict[str, Any]:
    """Name the tensors on the device at the planned peak, and the op that runs there."""
    after: Timeline = planned.after()
    where = after.peak_position
    if where is None:
        return {"op": None, "tensors": [], "left_out": 0, "left_out_bytes": 0}
    op = planned.graph.ops[after.order[where]]
    live = [(stay.tensor, stay.nbytes) for stay in after.live_at(where)]
    if op.workspace_bytes:
        live = sorted([*live, (-1 - op.id, round_up(op.workspace_bytes))], key=lambda one: -one[1])
    rest = live[MOST_AT_PEAK:]
    return {
        "op": op.name,
        "tensors": [tensors.number(planned.graph, tensor) for tensor, _ in live[:MOST_AT_PEAK]],
        "left_out": len(rest),
        "left_out_bytes": sum(nbytes for _, nbytes in rest),
    }


def _pool(planned: Planned, limit_bytes: int | None, tensors: _Tensors) -> dict[str, Any]:
    """Lay out the simulated pool at its fullest moment."""
    buffers, plan = Buffers.of(planned.graph), planned.plan
    edited = not plan.is_empty
    demand = Demand.of(
        buffers, plan.order, plan.swaps, fillers=plan.fillers, batches=plan.batches, edited=edited
    )
    room = plan.peak_bytes if limit_bytes is None else max(1, limit_bytes - planned.base_bytes)
    pool = map_pool(demand, room, pooled=edited)
    largest = sorted(pool.chunks, key=lambda chunk: -chunk.nbytes)[:MOST_CHUNKS]
    named = sorted(largest, key=lambda chunk: chunk.offset)
    holes = pool.holes
    return {
        "size": pool.size,
        "asked": room,
        "used": pool.used,
        "chunks": [
            [
                chunk.offset,
                chunk.nbytes,
                None if chunk.tensor is None else tensors.number(planned.graph, chunk.tensor),
            ]
            for chunk in named
        ],
        "chunks_left_out": len(pool.chunks) - len(named),
        "chunks_left_out_bytes": sum(one.nbytes for one in pool.chunks) - sum(one.nbytes for one in named),
        "holes": len(holes),
        "free_bytes": sum(nbytes for _, nbytes in holes),
        "largest_hole_bytes": max((nbytes for _, nbytes in holes), default=0),
    }


def _policies(planned: Planned, config: LMSConfig | None) -> dict[str, Any]:
    """Plan the step with other policies: the memory and the time that each needs."""
    plan = planned.plan
    here = simulate(Buffers.of(planned.graph), plan.order, plan.swaps, planned.costs, edges=plan.serial_edges)
    base, peak = planned.base_bytes, planned.plan.peak_bytes
    known: list[list[Any]] = [["this plan", base + peak, _short(here.makespan_s), True]]
    if config is None or len(planned.unedited.ops) > MOST_OPS:
        return {"points": known, "left_out": "a step of so many ops is not planned again" if config else ""}
    until_s = time.perf_counter() + POLICIES_S
    plain = replace(config, policy="auto", recompute="off", budget_bytes=None, margin=0.0, exclude_bytes=0)
    case = Case.of(planned.unedited, plain, planned.costs)
    whole_s = sum(case.seconds)
    known.append(["no swapping", base + case.peak_before_bytes, _short(whole_s), False])
    wishes = [
        ("all", replace(plain, policy="all")),
        *(
            (
                f"budget {share:.0%}",
                replace(plain, policy="budget", budget_bytes=max(1, int(case.peak_before_bytes * share))),
            )
            for share in SHARES
        ),
        ("threshold", replace(plain, policy="threshold")),
        ("recompute only", replace(plain, policy="all", recompute="only")),
    ]
    left: list[str] = []
    for name, wish in wishes:
        if time.perf_counter() > until_s:
            left.append(name)
            continue
        made, graph, seconds = _plan_for(planned, case, wish)
        time_s = simulate(Buffers.of(graph), made.order, made.swaps, planned.costs, seconds).makespan_s
        known.append([name, base + made.peak_bytes, _short(time_s), False])
    return {"points": known, "left_out": f"for want of time: {', '.join(left)}" if left else ""}


def _plan_for(planned: Planned, case: Case, wish: LMSConfig) -> tuple[Any, Graph, Sequence[float] | None]:
    if wish.recompute == "off":
        return plan_case(case, wish, None), case.graph, case.seconds
    decided = decide(planned.unedited, wish, planned.device_type, None, planned.costs)
    return decided.plan, decided.graph, None
