"""Gather the figures of what LMS does in this process, and the latest plans."""

import os
from collections.abc import Callable, Collection, Container, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from lms.device.device import Device, read_devices
from lms.report.stats import GraphStats, Planned, Report, graph_key, trace_key
from lms.swaps.swap_planner import LEAVES_WHAT_FITS
from lms.transports.base import StoreStats

TRACES = 4
"""The most traces of one step whose figures wait to be worked out."""
DESCRIBED = 32
"""Graphs that are described in full, the latest ones: a description holds the whole graph."""

Describe = Callable[[], "tuple[GraphStats, Planned] | None"]
"""Works out the figures of a step that stays as it is; ``None`` where it cannot be read."""


@dataclass
class Collector:
    """Gathers the figures; the only class here that changes."""

    graphs: list[GraphStats] = field(default_factory=list)
    plans: int = 0
    warnings: list[str] = field(default_factory=list)
    retries: int = 0

    _planned: dict[Hashable, Planned] = field(default_factory=dict)
    _postponed: list[tuple[GraphStats, Describe]] = field(default_factory=list)
    _peaks: dict[str, dict[Hashable, int]] = field(default_factory=dict)
    """By device and trace the most bytes from its latest plan to the next one; 0 for the one planned last."""

    def add(self, stats: GraphStats, planned: Planned) -> None:
        """Add a planned graph."""
        self.plans += 1
        self.graphs.append(stats)
        self._forget(stats)
        self._keep(stats, planned)

    def postpone(self, stats: GraphStats, describe: Describe) -> None:
        """Add a graph that stays as it is, whose figures are worked out when they are asked for."""
        self.plans += 1
        self.graphs.append(stats)
        self._forget(stats)
        self._planned.pop(trace_key(stats), None)
        self._postponed = [*self._postponed, (stats, describe)][-DESCRIBED:]

    def measure(self, stats: GraphStats, device: Device) -> None:
        """Start a new measurement of a device's peak for a graph that was just planned."""
        memory, peaks = device.memory(), self._peaks.setdefault(device.name, {})
        if peaks and memory is not None:
            peaks[next(reversed(peaks))] = memory[1]
        peaks.pop(trace_key(stats), None)  # of an earlier plan
        peaks[trace_key(stats)] = 0
        device.reset_peak()

    def withdraw(self, graphs: Collection[GraphStats]) -> None:
        """Drop the figures of plans that are made once more at once."""
        gone = {id(one) for one in graphs}
        left = [one for one in self.graphs if id(one) not in gone]
        self.plans -= len(self.graphs) - len(left)
        self.graphs[:] = left

    @property
    def planned(self) -> Mapping[Hashable, Planned]:
        """The latest plan of each trace of a graph, device and frame, in the order of their making."""
        self._settle()
        return self._planned

    @property
    def latest(self) -> Planned | None:
        """The latest plan."""
        return next(iter([*self.planned.values()][-1:]), None)

    @property
    def largest(self) -> Planned | None:
        """The plan of the step with the most ops; the latest of several."""
        return max(reversed([*self.planned.values()]), key=lambda one: len(one.graph.ops), default=None)

    def planned_of(self, name: str, functions: Container[str] = ()) -> Planned | None:
        """Return the latest plan of these functions of the runtime; else of that name, else of all."""
        found = [*reversed([*self.planned.values()])]
        of_functions = (one for one in found if one.function in functions)
        of_name = (one for one in found if one.name == name)
        return next(chain(of_functions, of_name, found), None)

    def _forget(self, stats: GraphStats) -> None:
        """Describe no more what a later plan of the same graph has replaced."""
        others = [one for one in self._postponed if trace_key(one[0]) != trace_key(stats)]
        alike = [id(one) for one in others if graph_key(one[0]) == graph_key(stats)]
        older = alike[: max(0, len(alike) - TRACES + 1)]
        self._postponed = [one for one in others if id(one) not in older]

    def _settle(self) -> None:
        """Work out what was postponed."""
        described: dict[Hashable, Planned] = {}
        while self._postponed:
            stats, describe = self._postponed.pop(0)
            found = describe()
            if found is not None:
                told = replace(found[0], first_run_s=stats.first_run_s, function=stats.function)
                self.graphs[:] = [told if one is stats else one for one in self.graphs]
                # It may have been read for another trace.
                described[trace_key(stats)] = replace(found[1], function=stats.function)
        if described:
            self._planned = {**described, **self._planned}  # what was planned since is later

    def _keep(self, stats: GraphStats, planned: Planned) -> None:
        self._planned.pop(trace_key(stats), None)
        self._planned[trace_key(stats)] = planned
        for key in [*self._planned][:-DESCRIBED]:
            del self._planned[key]

    def executed(self, planned: Sequence[GraphStats], swap_outs: int) -> None:
        """Note how many swap-outs ran in the call for which ``planned`` were made.

        Several plans are counted together: where their sum is not ``swap_outs``, nothing is noted for them.
        """
        if len(planned) > 1 and sum(one.copies_out for one in planned) != swap_outs:
            return
        ran = {id(one): one.tensors if len(planned) > 1 else swap_outs for one in planned}
        self.graphs[:] = [
            replace(one, executed=ran[id(one)]) if id(one) in ran else one for one in self.graphs
        ]

    def first_run(self, planned: Sequence[GraphStats], seconds: float) -> None:
        """Note how long the first run of steps took that XLA compiles."""
        ran = {graph_key(one) for one in planned if one.segments or one.whole}
        now = {
            id(one): replace(one, first_run_s=seconds)
            for one in self.graphs
            if graph_key(one) in ran and one.first_run_s is None
        }
        self.graphs[:] = [now.get(id(one), one) for one in self.graphs]
        self._postponed = [(now.get(id(one), one), describe) for one, describe in self._postponed]

    @property
    def fullest_device(self) -> str:
        """The name of the device with the largest planned peak of all; empty before any plan."""
        fullest = max(self.graphs, key=lambda one: one.planned_peak_bytes or 0, default=None)
        return fullest.place[0] if fullest is not None and fullest.planned_peak_bytes else ""

    def report(self, device: Device, transport: Any, *, settled: bool = True) -> Report:
        """Return the figures so far as a value; ``settled``: those that were postponed, too."""
        if settled:
            self._settle()
        memory = device.memory()
        return Report(
            device,
            transport.name if transport is not None else "none",
            tuple(map(self._with_likely_peak, self.graphs)),
            None if memory is None else memory[1],
            transport.stats() if transport is not None else StoreStats(),
            self.retries,
            tuple(self.warnings),
            earlier_peaks=dict(self._peaks.get(device.name, {})),
        )

    def _with_likely_peak(self, stats: GraphStats) -> GraphStats:
        """Return the figures of a latest plan that fills what it may with the peak that is likely."""
        planned, peak = self._planned.get(trace_key(stats)), stats.planned_peak_bytes
        is_simple = stats.policy in LEAVES_WHAT_FITS and not (stats.segments or stats.whole)
        if planned is None or peak is None or not is_simple:
            return stats
        if next(one for one in reversed(self.graphs) if trace_key(one) == trace_key(stats)) is not stats:
            return stats
        room, likely = planned.room_bytes, planned.likely_peak_bytes
        if room is None or likely is None or peak - stats.base_bytes > room:
            return stats
        return replace(stats, planned_peak_bytes=stats.base_bytes + max(likely, planned.plan.peak_bytes))


def report_idle(why: str) -> Report:
    """Return the report of a process in which LMS plans nothing."""
    return replace(Collector().report(read_devices(os.environ)[0], None), idle=why)
