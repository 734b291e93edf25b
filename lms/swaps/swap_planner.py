"""Plan a :class:`~lms.ir.swap_plan.SwapPlan` for a graph and a config: deterministic, nearly linear."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace

from lms.config import LMSConfig, levels_named
from lms.ir.eligibility import UNKNOWN_SIZE
from lms.ir.graph import Graph
from lms.ir.liveness import Buffers
from lms.ir.swap_plan import Rejected, SerialEdge, Swap, SwapPlan
from lms.schedule.op_order import executor_order, level_edges, topological_levels
from lms.schedule.schedule import Schedule, Trip
from lms.simulate.cost_model import Costs
from lms.simulate.streams import spread, stream_edges
from lms.swaps.budget import NO_STALL, Pace, fit, memory_with, postpone, prefetch
from lms.swaps.case import Case, Way
from lms.swaps.threshold import best_point, grid, plan_threshold, rule_of, uses_first_generation

NOT_NEEDED, NO_GAP = "not needed to fit", "all its uses are neighbours"
"""Reasons why a tensor stays that could be swapped."""

LEAVES_WHAT_FITS = ("auto", "budget")
"""The policies that edit nothing where a step fits, or where the device's size is not known."""


def plan(
    graph: Graph, config: LMSConfig, *, limit_bytes: int | None = None, costs: Costs | None = None
) -> SwapPlan:
    """Decide what a step swaps.

    Args:
        graph: The step.
        config: Policy and parameters.
        limit_bytes: What the device has for the step's own tensors (its limit less what lies there already).
            With policy ``auto`` it is the budget; with ``threshold`` the tuner fits parameters left at -1 to
            it. Where ``config.budget_bytes`` is less, that counts.
        costs: The device and its link; the default is a common GPU.

    Returns:
        The plan. Check ``feasible``: a budget that cannot be met gives the plan that comes closest.
    """
    return plan_case(Case.of(graph, config, costs or Costs()), config, limit_bytes)


def plan_case(case: Case, config: LMSConfig, limit_bytes: int | None) -> SwapPlan:
    """Decide what a step swaps, from an analysis that several plans can share.

    ``config`` may differ from the one of the analysis in all but ``min_tensor_bytes`` and ``recompute``.
    """
    budget = usable_bytes(config, limit_bytes)
    if config.policy == "all":
        return _plan_all(case, budget)
    if config.policy == "threshold":
        if config.n_tensors == 0:
            return _untouched(config, case, budget, "nothing is edited: n_tensors is 0")
        return _plan_threshold(case, config, budget)
    if budget is None:
        unknown = "nothing is edited: the device has no known limit; set budget_bytes"
        return _untouched(config, case, None, unknown)
    if case.peak_before_bytes <= budget and not case.streams:
        return _untouched(config, case, budget, _why_it_fits(case))
    made = plan_budget(case, budget)
    if made.feasible or case.streams or made.peak_bytes < case.peak_before_bytes:
        return made
    return _explained(case, _untouched(config, case, budget, ""))


def usable_bytes(config: LMSConfig, limit_bytes: int | None) -> int | None:
    """Return the bytes that a plan may use: the budget less what is to be left free, less the margin.

    The budget is ``budget_bytes``, whatever the policy, or what the device has, if that is less.
    """
    known = [one for one in (config.budget_bytes, limit_bytes) if one is not None]
    if not known:
        return None
    budget = min(known)
    return max(0, int((budget - config.exclude_bytes) * (1 - config.margin)))


NEAR = 0.15
"""Ways of policy ``all`` whose memory, as their steps see it, is so near the least are told apart exactly."""


SHORTEST = (2, 4)
"""Least numbers of steps between two uses that are worth a trip: the shorter ones often gain nothing."""


def plan_all(schedule: Schedule, shortest: int = 2) -> tuple[Trip, ...]:
    """Send every buffer away between any two uses ``shortest`` steps apart, and fetch it just in time."""
    return tuple(
        Trip(root, left, back, trigger=back - 1, freed=left + 1)
        for root, steps in schedule.uses.items()
        for left, back in zip(steps, steps[1:], strict=False)
        if back - left >= shortest
    )


def least_plans(case: Case, budget: int | None) -> list[SwapPlan]:
    """Return the plans that policy ``all`` chooses from; each needs the least memory in some graph."""
    return [_overlapped(case, schedule, trips, budget) for schedule, trips in _least_trips(case)]


def _overlapped(
    case: Case, schedule: Schedule, trips: tuple[Trip, ...], budget: int | None, *, roomy: bool = False
) -> SwapPlan:
    """Make the plan whose copies run beside compute as far as that takes no more memory.

    If it may be ``roomy``, the largest buffer may lie there once more, within the budget, while it is copied.
    Of plans as fast as each other the one with the lowest peak is taken.
    """
    plain = _chained("all", case, schedule, trips, budget)
    memory, pace = memory_with(schedule, trips), Pace.of(schedule, case.seconds)
    largest = max((swap.nbytes for swap in plain.swaps), default=0)
    allowed = [plain.peak_bytes]
    if roomy and budget is not None and case.costs.overlaps:
        allowed.append(min(budget, plain.peak_bytes + largest))
    found = [plain]
    for peak in allowed:
        most = memory.largest(0, len(memory) - 1) + peak - plain.peak_bytes
        for first, then in ((postpone, prefetch), (prefetch, postpone)):
            moved = first(schedule, trips, most, case.costs, pace)
            moved = then(schedule, moved, most, case.costs, pace)
            made = _chained("all", case, schedule, moved, budget)
            if made.peak_bytes <= max(plain.peak_bytes, peak):
                found.append(made)
    rated = [(case.makespan_s(made), made) for made in found]
    fast_s = NO_STALL * min(makespan_s for makespan_s, _ in rated)
    return min((one for one in rated if one[0] <= fast_s), key=lambda one: (one[1].peak_bytes, one[0]))[1]


def _plan_all(case: Case, budget: int | None) -> SwapPlan:
    """Return the plan of policy ``all`` that needs the least memory, but for that of a copy under way.

    The memory as the steps see it selects the candidates; the exact peak decides between them.
    """
    rated = [(_memory_and_traffic(way), way) for way in _least_trips(case)]
    least = min(memory for (memory, _), _ in rated)
    near = [(moved, way) for (memory, moved), way in rated if memory <= least * (1 + NEAR)]
    schedule, trips = min(near, key=lambda one: (_peak_bytes(case, *one[1]), one[0]))[1]
    return _overlapped(case, schedule, trips, budget, roomy=True)


def _peak_bytes(case: Case, schedule: Schedule, trips: Iterable[Trip]) -> int:
    return case.buffers.timeline(schedule.order, schedule.swaps(trips)).peak_bytes


def _least_trips(case: Case) -> list[tuple[Schedule, tuple[Trip, ...]]]:
    return [(schedule, plan_all(schedule, shortest)) for schedule in case.schedules for shortest in SHORTEST]


def _memory_and_traffic(way: tuple[Schedule, tuple[Trip, ...]]) -> tuple[int, int]:
    """Return the peak in bytes, as the steps of the schedule see it, and the bytes that are moved."""
    schedule, trips = way
    memory, nbytes = memory_with(schedule, trips), schedule.buffers.nbytes
    moved = [trip.tensor for trip in trips]
    return memory.largest(0, len(memory) - 1), sum(nbytes[root] for root in [*moved, *set(moved)])


def _plan_threshold(case: Case, config: LMSConfig, budget: int | None) -> SwapPlan:
    levels = topological_levels(case.graph)
    schedule = case.given if config.serialization or config.serialization_by_size else case.frugal
    tuned = None
    if not uses_first_generation(config) and _has_open_parameters(config) and budget is not None:
        tuned = best_point(
            grid(schedule, levels, case.costs, rule_of(config), count=4, aheads=(3, 10)), budget
        ).rule
    rule = rule_of(config, tuned)
    trips = plan_threshold(schedule, levels, rule)
    chained = _chained("threshold", case, schedule, trips, budget)
    note = f"threshold {rule.threshold}, groupby {rule.groupby}, ahead {rule.ahead}"
    wanted = wanted_levels(config, case.buffers, levels)
    made = _by_levels(case, chained, levels, wanted) if wanted else chained
    return replace(made, notes=(*made.notes, note))


def _by_levels(case: Case, chained: SwapPlan, levels: Sequence[int], wanted: Collection[int]) -> SwapPlan:
    """Order the big ops of the ``wanted`` levels, and leave the others as an executor runs them.

    The swaps of ``chained`` stay. A copy back starts behind its trigger; with no chain before it a trigger
    waits for the swapped op itself.
    """
    edges = (
        *level_edges(case.graph, chained.order, levels, wanted, case.big),
        *(SerialEdge(swap.after, back.trigger) for swap in chained.swaps for back in swap.swap_ins),
        *(
            SerialEdge(swap.until, op)
            for swap in chained.swaps
            if swap.until is not None
            for op in swap.blocks
        ),
    )
    waits = (edge for swap in chained.swaps for edge in swap.edges)
    order = executor_order(case.graph, (*edges, *waits))
    peak = case.buffers.timeline(order, chained.swaps).peak_bytes
    made = replace(
        chained,
        order=order,
        serial_edges=edges,
        peak_bytes=peak,
        floor_bytes=min(chained.floor_bytes, peak),
        notes=(),
    )
    told = _explained(case, made)
    if peak <= chained.peak_bytes:
        return told
    lower = f"without named levels the step would need {_mib(chained.peak_bytes)}, not {_mib(peak)}"
    return replace(told, notes=(*told.notes, lower))


def _has_open_parameters(config: LMSConfig) -> bool:
    return min(config.swapout_threshold, config.swapin_groupby, config.swapin_ahead) < 0


def wanted_levels(config: LMSConfig, buffers: Buffers, levels: Sequence[int]) -> frozenset[int]:
    """Return the levels that ``serialization`` (``"7"``, ``"3:5"``) or ``serialization_by_size`` asks for."""
    top = max(levels, default=-1) + 1
    wanted: set[int] = set()
    for text in config.serialization:
        wanted.update(range(top)[levels_named(text)])
    if config.serialization_by_size:
        sizes = [0] * top
        for op in buffers.graph.ops:
            sizes[levels[op.id]] += sum(buffers.nbytes[tensor] for tensor in op.outputs)
        limit = config.serialization_by_size * 2**30
        wanted.update(level for level, nbytes in enumerate(sizes) if nbytes > limit)
    return frozenset(wanted)


def budget_ways(case: Case, budget: int) -> Iterator[Way]:
    """Yield a plan for each order, that which needs less without swaps first."""
    for schedule in sorted(case.schedules, key=lambda schedule: schedule.timeline.peak_bytes):
        key = schedule is case.given, budget
        if key not in case.ways:
            fits = schedule.timeline.peak_bytes <= budget
            trips = () if fits else fit(schedule, budget, case.costs, case.seconds)
            case.ways[key] = Way(schedule, trips, budget, plan_trips(case, schedule, trips, budget))
        yield case.ways[key]


def plan_trips(case: Case, schedule: Schedule, trips: Iterable[Trip], budget: int) -> SwapPlan:
    """Make the plan that keeps to a budget by taking the trips."""
    return _chained("budget", case, schedule, trips, budget)


def plan_budget(case: Case, budget: int) -> SwapPlan:
    """Return the plan of the first order that keeps to a budget, else the one that comes closest."""
    plans = []
    for way in budget_ways(case, budget):
        if way.plan.feasible:
            return way.plan
        plans.append(way.plan)
    return min(plans, key=lambda option: option.peak_bytes)


def _chained(
    policy: str, case: Case, schedule: Schedule, trips: Iterable[Trip], budget: int | None
) -> SwapPlan:
    """Make the plan that takes the trips and keeps the schedule's chain in order."""
    swaps = schedule.swaps(trips)
    order, edges = _with_streams(case, schedule, swaps, budget)
    peak = case.buffers.timeline(order, swaps).peak_bytes
    floor, floor_op = case.floor
    chosen = {swap.tensor for swap in swaps}
    idle = tuple(
        Rejected(root, case.graph.tensors[root].nbytes, NOT_NEEDED if root in schedule.apart else NO_GAP)
        for root in schedule.candidates
        if root not in chosen
    )
    made = SwapPlan(
        policy=policy,
        order=order,
        swaps=swaps,
        serial_edges=edges,
        rejected=case.rejected + idle,
        peak_before_bytes=case.peak_before_bytes,
        peak_bytes=peak,
        floor_bytes=min(floor, peak),
        floor_op=floor_op,
        budget_bytes=budget,
    )
    return _explained(case, made)


def _with_streams(
    case: Case, schedule: Schedule, swaps: tuple[Swap, ...], budget: int | None
) -> tuple[tuple[int, ...], tuple[SerialEdge, ...]]:
    """Return a schedule's order and edges, with variables that stream as far apart as the budget lets them.

    Without a budget they take no more memory than the step does otherwise.
    """
    if not case.streams:
        return schedule.order, schedule.serial_edges
    buffers, chain, floating = case.buffers, schedule.step.keys(), case.floating
    allowed = buffers.timeline(schedule.order, swaps).peak_bytes if budget is None else budget
    order = spread(buffers, schedule.order, chain, floating, swaps, allowed, case.costs, case.seconds)
    return order, (*schedule.serial_edges, *stream_edges(buffers, order, chain, floating))


def _explained(case: Case, made: SwapPlan) -> SwapPlan:
    return made if made.feasible else replace(made, notes=(_why_infeasible(case, made),))


def _why_infeasible(case: Case, made: SwapPlan) -> str:
    op = "" if made.floor_op is None else f" (at {case.graph.ops[made.floor_op].name})"
    may_swap = "recompute 'auto', which swaps too, " if case.only_recomputes else ""
    budget, needs = _apart(made.budget_bytes or 0, made.peak_bytes)
    return (
        f"the budget of {budget} is not met: the step needs {needs}, "
        f"no plan gets below {_mib(made.floor_bytes)}{op}; "
        f"{may_swap}a smaller batch or image, margin or min_tensor_bytes would help"
    )


def _why_it_fits(case: Case) -> str:
    known = _mib(case.peak_before_bytes)
    unknown = sum(rejection.reason == UNKNOWN_SIZE for rejection in case.rejected)
    if not unknown:
        return f"nothing is edited: the step fits ({known})"
    return f"nothing is edited: what is known fits ({known}); the sizes of {unknown} tensors are open"


def _untouched(config: LMSConfig, case: Case, budget: int | None, note: str) -> SwapPlan:
    floor, floor_op = case.floor
    return SwapPlan(
        policy=config.policy,
        order=case.given.order,
        swaps=(),
        serial_edges=(),
        rejected=case.rejected,
        peak_before_bytes=case.peak_before_bytes,
        peak_bytes=case.peak_before_bytes,
        floor_bytes=min(floor, case.peak_before_bytes),
        floor_op=floor_op,
        budget_bytes=budget,
        notes=(note,),
    )


def _apart(less: int, more: int) -> tuple[str, str]:
    """Return two numbers of bytes for people, in bytes where they would read the same in MiB."""
    one, other = _mib(less), _mib(more)
    return (one, other) if one != other else (f"{less:,} bytes", f"{more:,} bytes")


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f} MiB"
