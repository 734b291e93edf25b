"""Search the parameters that a user left at -1: simulate a grid of rules in time and memory."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lms.planner.policy_threshold import Rule, plan_threshold
from lms.schedule.schedule import Schedule, Trip
from lms.simulate.cost_model import Costs
from lms.simulate.step_time import Timing, simulate


@dataclass(frozen=True)
class GridPoint:
    """A rule, and the simulated times and peak of a step with it."""

    rule: Rule
    timing: Timing


AHEADS = (1, 3, 10, 30)
GROUPBYS = (0, 10)


def thresholds(schedule: Schedule, levels: Sequence[int], count: int = 6) -> tuple[int, ...]:
    """Return thresholds worth trying, descending: spread over the distances that occur."""
    distances = sorted(
        {
            levels[schedule.chain[back]] - levels[schedule.chain[left]]
            for steps in schedule.uses.values()
            for left, back in zip(steps, steps[1:], strict=False)
            if back - left > 1
        }
    )
    if not distances:
        return (1,)
    picks = {distances[index * (len(distances) - 1) // count] - 1 for index in range(count + 1)}
    return tuple(sorted({max(1, pick) for pick in picks}, reverse=True))


def grid(
    schedule: Schedule,
    levels: Sequence[int],
    costs: Costs,
    base: Rule,
    *,
    count: int = 6,
    aheads: Sequence[int] = AHEADS,
    groupbys: Sequence[int] = GROUPBYS,
) -> list[GridPoint]:
    """Simulate every combination; what ``base`` fixes otherwise (waiting, limits) stays."""
    seconds = costs.op_seconds(schedule.buffers.graph)
    timings: dict[tuple[Trip, ...], Timing] = {}  # many a rule asks for the same trips
    points = []
    for threshold in thresholds(schedule, levels, count):
        for groupby in groupbys:
            for ahead in aheads:
                rule = replace(base, threshold=threshold, groupby=groupby, ahead=ahead)
                trips = plan_threshold(schedule, levels, rule)
                if trips not in timings:
                    swaps = schedule.swaps(trips)
                    timings[trips] = simulate(schedule.buffers, schedule.order, swaps, costs, seconds)
                points.append(GridPoint(rule, timings[trips]))
    return points


def best(points: Sequence[GridPoint], budget_bytes: int | None) -> GridPoint:
    """Return the fastest point within the budget; where there is none, the one with the lowest peak."""
    fitting = [point for point in points if budget_bytes is None or point.timing.peak_bytes <= budget_bytes]
    if fitting:
        return min(fitting, key=lambda point: (point.timing.makespan_s, point.timing.peak_bytes))
    return min(points, key=lambda point: (point.timing.peak_bytes, point.timing.makespan_s))
