"""Make a graph ready for planning: its schedules, what may leave, what a plan of it costs."""

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from lms.config import LMSConfig
from lms.ir.eligibility import judge
from lms.ir.graph import Graph
from lms.ir.liveness import Buffers
from lms.ir.swap_plan import Rejected, SwapPlan
from lms.schedule.op_order import (
    big_ops,
    early_ops,
    executor_order,
    floating_ops,
    frugal_order,
    waits_for_device,
)
from lms.schedule.schedule import Schedule, Trip
from lms.simulate.cost_model import Costs
from lms.simulate.step_time import StreamedCopies, clock
from lms.simulate.streams import closest, streams_of

ONLY_RECOMPUTED = "recompute is 'only'"
"""The reason why a tensor stays that could be swapped."""

Cost = tuple[float, int]
"""The seconds that a step takes, to the nanosecond, because sums of floats differ behind that, and the bytes
that it moves."""


@dataclass(frozen=True)
class Case:
    """One graph made ready for planning; every policy starts from it."""

    buffers: Buffers
    big: frozenset[int]
    floating: frozenset[int]
    """Ops that wait for other ranks, and what depends on them."""
    rejected: tuple[Rejected, ...]
    given: Schedule
    """In the order of the graph, but for what waits for other ranks, which comes last."""
    frugal: Schedule
    """In the order that keeps memory low."""
    peak_before_bytes: int
    """Counts what the unedited step needs, in the order in which an executor runs it."""
    costs: Costs

    @classmethod
    def of(cls, graph: Graph, config: LMSConfig, costs: Costs) -> "Case":
        """Analyse the graph; of the config only ``min_tensor_bytes`` and ``recompute`` matter."""
        buffers = Buffers.of(graph)
        floating, early = floating_ops(graph), early_ops(graph)
        big = big_ops(buffers, config.min_tensor_bytes, floating | early | streams_of(graph))
        verdict = judge(buffers, config.min_tensor_bytes, floating, big, early)
        if config.recompute == "only":
            verdict = verdict.without_candidates(ONLY_RECOMPUTED, buffers)
        waits = waits_for_device(graph, copies=False)
        given_order = sorted(range(len(graph.ops)), key=lambda op: (op not in early, waits[op]))
        orders = (given_order, frugal_order(buffers, big, floating))
        given, frugal = (
            Schedule.of(
                *(buffers, closest(graph, order), big, verdict.candidates), copies_at_once=costs.frees_at_once
            )
            for order in orders
        )
        unedited = closest(graph, executor_order(graph, ahead=costs.overlaps))
        before = buffers.timeline(unedited, ()).peak_bytes
        return cls(buffers, big, floating, verdict.rejected, given, frugal, before, costs)

    @property
    def graph(self) -> Graph:
        """The graph."""
        return self.buffers.graph

    @property
    def only_recomputes(self) -> bool:
        """Tell whether tensors stay because the configuration lets none be swapped."""
        return any(rejection.reason == ONLY_RECOMPUTED for rejection in self.rejected)

    @cached_property
    def streams(self) -> bool:
        """Tell whether variables stream: their copies run beside other ops, so these need an order."""
        return bool(streams_of(self.graph))

    @property
    def makes_batches(self) -> bool:
        """Tell whether batches may have room of their own: a pool that grows has none to keep apart."""
        return self.costs.makes_batches and self.costs.resident_bytes is None

    @property
    def fills(self) -> bool:
        """Tell whether plans may have fillers: where the pool grows, these would make it grow."""
        return self.costs.fills and self.costs.resident_bytes is None

    @cached_property
    def seconds(self) -> tuple[float, ...]:
        """The time of each op by id."""
        return self.costs.op_seconds(self.graph)

    def cost(self, made: SwapPlan) -> Cost:
        """Return what a step with a plan costs."""
        return round(self.makespan_s(made), 9), made.bytes_moved

    def makespan_s(self, made: SwapPlan) -> float:
        """Return the seconds that a step takes with a plan, computed once for all plans with its parts."""
        parts = made.order, made.swaps, made.serial_edges
        # To compare the parts takes long. The cache keeps them, so that no other object can get their ids.
        key = tuple(map(id, parts))
        if key not in self._makespans:
            streamed = StreamedCopies.of(self.graph, made.serial_edges) if self.streams else None
            run = clock(made.order, made.swaps, self.costs, self.seconds, streamed)
            self._makespans[key] = parts, run.now_s
        return self._makespans[key][1]

    @cached_property
    def _makespans(self) -> dict[tuple[int, ...], tuple[tuple[object, ...], float]]:
        """The parts of plans and their steps' seconds, by the parts' identities."""
        return {}

    @property
    def schedules(self) -> tuple[Schedule, ...]:
        """The orders worth planning for, each once."""
        return (self.given,) if self.given.order == self.frugal.order else (self.frugal, self.given)

    @cached_property
    def ways(self) -> dict[tuple[bool, int], "Way"]:
        """The ways found so far, by whether they keep the given order, and budget (:func:`budget_ways`)."""
        return {}

    @cached_property
    def fits_by_chance(self) -> dict[Hashable, bool]:
        """Note whether plans fit whichever ops run side by side, as far as that was looked at."""
        return {}

    @cached_property
    def tries(self) -> dict[tuple[int | None, int, int], tuple[SwapPlan | None, list[SwapPlan]]]:
        """The plans tried so far, by budget, room and limit (:mod:`lms.planner.fragmentation`)."""
        return {}

    @cached_property
    def floor(self) -> tuple[int, int | None]:
        """The least that any plan can reach, and the op that needs it."""
        return min((schedule.floor for schedule in self.schedules), key=lambda floor: floor[0])


class Way(NamedTuple):
    """One way to keep to a budget: an order and trips."""

    schedule: Schedule
    trips: tuple[Trip, ...]
    budget_bytes: int
    plan: SwapPlan
