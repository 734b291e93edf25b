"""Ways to run a step, each planned for one batch and known for all.

A plan's copies, repeated ops and order stay as they are when the batch grows, and its memory at each point is
a line in the batch. So one plan tells the largest batch on every device, and its time there is simulated.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from lms.config import LMSConfig
from lms.forecast.step import TracedStep
from lms.ir.graph import Graph
from lms.ir.liveness import round_up
from lms.ir.swap_plan import SerialEdge, Swap, SwapPlan
from lms.planner.choices import Choice, Choices
from lms.planner.recomputation import Recomputation, recompute
from lms.schedule.op_order import executor_order
from lms.simulate.cost_model import Costs
from lms.simulate.step_time import Clock, StreamedCopies, clock
from lms.swaps.case import Case
from lms.swaps.swap_planner import plan_case

LARGEST_BATCH = 1 << 20
"""Larger ones are not looked for."""
CLOSE = 1.02
"""A plan is made for this much more than the least that its working sets need."""
SHARES = (0.25, 0.5, 0.75, 1.0)
SEGMENTS = (4, 8, 16)
"""Of the choices of what to recompute (:mod:`lms.planner.choices`)."""
MANY_OPS = 12_000
"""Steps of more ops get every other choice: each takes a ResNet-152's 30,000 ops two seconds, and the largest
batches of three GPUs with half of the choices were at most 0.6% smaller."""
LEAST = LMSConfig(policy="all")
CURVE_POINTS = 240


@dataclass(frozen=True, eq=False)
class Variant:
    """A step, or a step in which ops are repeated, made ready for planning at one batch."""

    step: TracedStep
    batch: int
    case: Case
    repeated: Recomputation | None = None
    choice: int | None = None
    """Which of the choices of what to repeat it is."""

    def source(self, tensor: int) -> int:
        """Return the tensor of the traced step that has the size of ``tensor``."""
        return tensor if self.repeated is None else self.repeated.tensors[tensor]

    def source_op(self, op: int) -> int:
        """Return the op of the traced step that ``op`` is or repeats."""
        return op if self.repeated is None else self.repeated.ops[op]

    def at(self, batch: int) -> "Variant":
        """Make the same ready for another batch."""
        traced = self.step.of(batch)
        graph = traced if self.repeated is None else _resized(self.repeated, traced)
        return replace(self, batch=batch, case=Case.of(graph, LEAST, self.case.costs))


def _resized(made: Recomputation, traced: Graph) -> Graph:
    tensors = tuple(
        one._replace(nbytes=traced.tensors[source].nbytes)
        for one, source in zip(made.graph.tensors, made.tensors, strict=True)
    )
    ops = tuple(
        one._replace(workspace_bytes=traced.ops[source].workspace_bytes, flops=traced.ops[source].flops)
        for one, source in zip(made.graph.ops, made.ops, strict=True)
    )
    return replace(made.graph, ops=ops, tensors=tensors)


@dataclass(frozen=True, eq=False)
class Way:
    """A variant of a step with a plan, for any batch."""

    variant: Variant
    order: tuple[int, ...]
    swaps: tuple[Swap, ...] = ()
    edges: tuple[SerialEdge, ...] = ()
    """The control edges of the plan."""

    @classmethod
    def of(cls, variant: Variant, made: SwapPlan) -> "Way":
        """Return the way with a plan."""
        return cls(variant, made.order, made.swaps, made.serial_edges)

    @cached_property
    def lines(self) -> tuple[tuple[float, float], ...]:
        """For each point of the step the bytes without any example, and those of each example."""
        variant = self.variant
        step, buffers = variant.step, variant.case.buffers
        planned = buffers.timeline(self.order, self.swaps)
        fixed, grows = ([0.0] * (2 * len(self.order) + 1) for _ in range(2))
        for stay in planned.residencies:
            growth = step.growth[variant.source(stay.tensor)]
            base = stay.nbytes - growth * variant.batch
            fixed[stay.first] += base
            fixed[stay.last + 1] -= base
            grows[stay.first] += growth
            grows[stay.last + 1] -= growth
        sums = list(zip(accumulate(fixed), accumulate(grows), strict=True))[:-1]
        for op in buffers.with_workspace:
            point = 2 * buffers.placement(self.order).position[op]
            growth = step.scratch_growth[variant.source_op(op)]
            own = round_up(buffers.graph.ops[op].workspace_bytes) - growth * variant.batch
            sums[point] = (sums[point][0] + own, sums[point][1] + growth)
        return tuple(sums)

    @cached_property
    def _highest(self) -> tuple[tuple[float, float], ...]:
        """The lines that are the highest at some batch."""
        found: list[tuple[float, float]] = []
        for base, slope in sorted(set(self.lines), key=lambda line: (line[1], line[0])):
            while found and (found[-1][0] <= base or _is_below(found, base, slope)):
                found.pop()
            found.append((base, slope))
        return tuple(found)

    def peak_bytes(self, batch: int) -> int:
        """Return the most bytes that the step's own tensors take at a batch."""
        return int(max((base + slope * batch for base, slope in self._highest), default=0.0))

    def largest(self, usable: int) -> int:
        """Return the largest batch that fits in ``usable`` bytes, at most :data:`LARGEST_BATCH`."""
        most = float(LARGEST_BATCH)
        for base, slope in self._highest:
            if slope > 1e-9:
                most = min(most, (usable - base) / slope)
            elif base > usable:
                return 0
        return max(0, int(most))

    def run(self, batch: int, costs: Costs, scale: float = 1.0) -> Clock:
        """Simulate the times of the step at a batch."""
        variant = self.variant
        traced = variant.step.op_seconds(batch, costs, scale)
        seconds = traced if variant.repeated is None else [traced[op] for op in variant.repeated.ops]
        return clock(self.order, self._swaps_at(batch), costs, seconds, self._streamed)

    @cached_property
    def _streamed(self) -> StreamedCopies | None:
        return StreamedCopies.of(self.variant.case.graph, self.edges)

    def _swaps_at(self, batch: int) -> Sequence[Swap]:
        more, growth, source = batch - self.variant.batch, self.variant.step.growth, self.variant.source
        return [
            swap._replace(nbytes=max(0, int(swap.nbytes + growth[source(swap.tensor)] * more)))
            for swap in self.swaps
        ]

    def curve(self, batch: int, run: Clock, scale: float = 1.0) -> tuple[tuple[float, int], ...]:
        """Return seconds and bytes over a simulated step: the most of each of a few hundred spans."""
        spans: dict[int, int] = {}
        for place, op in enumerate(self.order):
            span = int(CURVE_POINTS * run.starts[op] / run.now_s) if run.now_s else 0
            near = self.lines[2 * place : 2 * place + 2]
            nbytes = int(scale * max(base + slope * batch for base, slope in near))
            spans[span] = max(spans.get(span, 0), nbytes)
        return tuple((run.now_s * span / CURVE_POINTS, spans[span]) for span in sorted(spans))


def _is_below(found: Sequence[tuple[float, float]], base: float, slope: float) -> bool:
    """Tell whether the last line is below the one before it or the new one at every batch from 0 on."""
    last_base, last_slope = found[-1]
    if slope == last_slope:
        return base >= last_base
    if len(found) == 1:
        return False
    before_base, before_slope = found[-2]
    return (before_base - base) * (last_slope - before_slope) <= (before_base - last_base) * (
        slope - before_slope
    )


def plain_way(step: TracedStep) -> Way:
    """Return the step as it runs without a plan."""
    case = Case.of(step.graph, LEAST, Costs())
    return Way(Variant(step, step.batch, case), executor_order(case.graph, ahead=case.costs.overlaps))


def swapping_ways(variant: Variant) -> Iterator[Way]:
    """Yield plans with swaps that take nearly the least memory: with few copies, and with all."""
    case = variant.case
    close = replace(LEAST, policy="budget", margin=0.0, budget_bytes=int(case.floor[0] * CLOSE))
    for config in (close, LEAST):
        made = plan_case(case, config, None)
        yield Way.of(variant, made)
        if made.feasible and config is close and variant.repeated is not None:
            return


def ordered_way(variant: Variant) -> Way:
    """Return the way with the lowest peak without swaps."""
    schedule = min(variant.case.schedules, key=lambda one: one.timeline.peak_bytes)
    return Way(variant, schedule.order)


def repeated_variants(variant: Variant, only: Collection[int] | None = None) -> Iterator[Variant]:
    """Yield the step with ops repeated, for a few choices of them, or for those of these numbers."""
    if only is None and len(variant.case.graph.ops) > MANY_OPS:
        only = range(1, len(SHARES) + len(SEGMENTS), 2)
    choices = Choices(variant.case, LEAST.min_tensor_bytes)
    if not choices.repeats.candidates:
        return
    wanted: list[Choice] = [*choices.shares(SHARES), *choices.segments(SEGMENTS)]
    for number, choice in enumerate(wanted):
        is_new = choice not in wanted[:number]
        if choice.dropped and (is_new if only is None else number in only):
            made = recompute(choices.repeats, choice.dropped, choice.retained)
            case = Case.of(made.graph, LEAST, variant.case.costs)
            yield replace(variant, case=case, repeated=made, choice=number)
