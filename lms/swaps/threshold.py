"""Policy ``threshold``: swap by distances in levels, as the second generation of Large Model Support.

The first generation's parameters are a front end: its rules are translated into the same :class:`Rule`.
Parameters that a user left at -1 are searched: a grid of rules is simulated in time and memory.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from lms.config import DEFAULTS, FIRST_RULES, LMSConfig
from lms.ir.backward import backward_ops
from lms.schedule.schedule import Schedule, Trip
from lms.simulate.cost_model import Costs
from lms.simulate.step_time import Timing, simulate


@dataclass(frozen=True)
class Rule:
    """Distances in levels (the longest path from the start of the step)."""

    threshold: int = 1
    """A buffer is swapped where its next use is further away than this."""
    groupby: int = 0
    """Uses that follow each other within this distance share a copy back."""
    ahead: int = 3
    """The copy back starts this many levels before its first use."""
    furthest: int | None = None
    """It never starts more levels ahead than this, also where nothing runs in between."""
    wait_out: bool = False
    """The next step waits for the copy to the host."""
    wait_in: bool = False
    """The step behind the trigger waits for the copy back."""
    by_order: bool = False
    """``ahead`` counts steps of the order, not levels (``ctrld_strategy="direct_order"``)."""
    by_chain: bool = False
    """``ahead`` counts ops of the forward pass, from the producer on; the copy back starts with the backward
    op of the op that is so far (``ctrld_strategy="chain_rule"``)."""
    most: int | None = None
    """The most buffers that are swapped, those made first."""
    forward_gap: int | None = 0
    """Least distance between two uses in the forward pass to swap there too; ``None``: never there."""


def rule_of(config: LMSConfig, tuned: Rule | None = None) -> Rule:
    """Return the rule that a config asks for; what it leaves at -1 comes from ``tuned``."""
    base = tuned or Rule()
    if uses_first_generation(config):
        return Rule(
            threshold=1,
            groupby=max(config.lb, 1) if config.fuse_swapins else 0,
            ahead=config.lb,
            furthest=config.ub,
            by_order=config.ctrld_strategy == "direct_order",
            by_chain=config.ctrld_strategy == "chain_rule",
            most=None if config.n_tensors < 0 else config.n_tensors,
            forward_gap=config.branch_threshold if config.swap_branches else None,
        )
    return Rule(
        threshold=base.threshold if config.swapout_threshold < 0 else config.swapout_threshold,
        groupby=base.groupby if config.swapin_groupby < 0 else config.swapin_groupby,
        ahead=base.ahead if config.swapin_ahead < 0 else config.swapin_ahead,
        wait_out=config.sync_mode in (1, 3),
        wait_in=config.sync_mode in (2, 3),
    )


def uses_first_generation(config: LMSConfig) -> bool:
    """Tell whether any of the first generation's parameters differs from its default."""
    return any(getattr(config, name) != DEFAULTS[name] for name in FIRST_RULES)


def plan_threshold(schedule: Schedule, levels: Sequence[int], rule: Rule) -> tuple[Trip, ...]:
    """Return every trip that the rule asks for; ``levels`` are by op id."""
    step_levels = [levels[op] for op in schedule.chain]
    asked = rule.forward_gap != 0 or rule.by_chain
    backward = backward_ops(schedule.buffers.graph) if asked else frozenset()
    matching = _Matching(schedule, backward)
    trips: list[Trip] = []
    swapped = 0
    for root, steps in schedule.uses.items():
        if rule.most is not None and swapped >= rule.most:
            break
        found = _trips(root, steps, step_levels, rule, matching)
        swapped += bool(found)
        trips += found
    return tuple(trips)


def _trips(
    root: int, steps: Sequence[int], levels: Sequence[int], rule: Rule, matching: "_Matching"
) -> list[Trip]:
    trips: list[Trip] = []
    for left, back in zip(steps, steps[1:], strict=False):
        distance = levels[back] - levels[left]
        limit = rule.groupby if trips else rule.threshold
        if back - left < 2 or distance <= limit or not _allowed(left, back, distance, rule, matching.steps):
            continue
        trigger = matching.trigger(root, left, back, rule) if rule.by_chain else None
        if trigger is None:
            trigger = _trigger(left, back, levels, rule)
        awaited = trigger + 1 if rule.wait_in and trigger + 1 < back else None
        trips.append(Trip(root, left, back, trigger, left + 1 if rule.wait_out else None, awaited))
    return trips


def _allowed(left: int, back: int, distance: int, rule: Rule, backward: Collection[int]) -> bool:
    if rule.forward_gap == 0 or (left not in backward and back in backward):
        return True
    return rule.forward_gap is not None and back not in backward and distance > rule.forward_gap


def _trigger(left: int, back: int, levels: Sequence[int], rule: Rule) -> int:
    """Return the last step that is far enough ahead of ``back``, or else the first after ``left``."""

    def ahead(step: int) -> int:
        return back - step if rule.by_order else levels[back] - levels[step]

    trigger = back - 1
    while trigger > left + 1 and ahead(trigger) < rule.ahead:
        if rule.furthest is not None and ahead(trigger - 1) > rule.furthest:
            break
        trigger -= 1
    return trigger


class _Matching:
    """Matches ops of the forward pass with the steps of the backward pass that read what they made."""

    def __init__(self, schedule: Schedule, backward: Collection[int]) -> None:
        self._schedule, self._backward = schedule, backward
        self.steps = frozenset(step for op, step in schedule.step.items() if op in backward)
        """The steps of the backward pass."""

    def trigger(self, root: int, left: int, back: int, rule: Rule) -> int | None:
        """Find the last backward step before ``back`` of the nearest op far enough from the producer.

        None where ``back`` is no step of the backward pass, or no op within ``ub`` has a step there.
        """
        if back not in self.steps:
            return None
        graph, step = self._schedule.buffers.graph, self._schedule.step
        ring = seen = frozenset({graph.tensors[root].op})
        distance = 0
        while ring and (rule.furthest is None or distance < rule.furthest):
            after = {later for op in ring for later in graph.successors[op]}
            ring = frozenset(after.difference(seen, self._backward))
            seen |= ring
            distance += 1
            if distance < rule.ahead:
                continue
            readers = {later for op in ring for later in graph.successors[op] if later in self._backward}
            matching = [step[op] for op in readers if op in step and left < step[op] < back]
            if matching:
                return max(matching)
        return None


# --- parameters left at -1 ---------------------------------------------------------------------------------


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


def best_point(points: Sequence[GridPoint], budget_bytes: int | None) -> GridPoint:
    """Return the fastest point within the budget; where there is none, the one with the lowest peak."""
    fitting = [point for point in points if budget_bytes is None or point.timing.peak_bytes <= budget_bytes]
    if fitting:
        return min(fitting, key=lambda point: (point.timing.makespan_s, point.timing.peak_bytes))
    return min(points, key=lambda point: (point.timing.peak_bytes, point.timing.makespan_s))
