"""Figures that are worked out when they are asked for stand beside those that were there at once."""

from dataclasses import replace
from typing import Any, ClassVar

import pytest

pytest.importorskip("tensorflow")
from lms.config import LMSConfig
from lms.device.device import Device
from lms.ir.graph import GraphBuilder
from lms.ir.swap_plan import SerialEdge
from lms.report.collector import Collector
from lms.report.stats import GraphStats, Planned
from lms.simulate.cost_model import V100
from lms.swaps.swap_planner import plan

MIB = 1 << 20
FITS = GraphStats("step", False, "nothing is edited", 30)
TOLD = replace(FITS, why="nothing is edited: the step fits (9 MiB)", peak_before_bytes=9)
EDITED = GraphStats("step", True, "2 tensors swapped", 30, tensors=2)
OTHER = replace(EDITED, name="another step")


def planned(name: str) -> Planned:
    build = GraphBuilder()
    build.add("x", "Placeholder", outputs=[64])
    graph = build.build()
    return Planned(name, graph, plan(graph, LMSConfig()), 0, None, graph)


def described(told: GraphStats | None = TOLD) -> tuple[Collector, list[int]]:
    """Return a collector with a postponed graph, and how often that was described."""
    collector, calls = Collector(), [0]

    def describe() -> Any:
        calls[0] += 1
        return told and (told, planned("fits"))

    collector.postpone(FITS, describe)
    return collector, calls


class Counting(Device):
    """A device whose peak since its last reset is set by a test."""

    peaks: ClassVar[list[int]] = []

    def memory(self) -> tuple[int, int]:
        return 0, self.peaks[-1]

    def reset_peak(self) -> None:
        self.peaks.append(0)


def graphs(collector: Collector, **how: bool) -> tuple[GraphStats, ...]:
    return collector.report(Device("CPU:0", None), None, **how).graphs


def test_what_was_postponed_is_described_once_and_when_asked_for() -> None:
    collector, calls = described()
    assert graphs(collector, settled=False) == (FITS,) and calls == [0]
    assert graphs(collector) == graphs(collector) == (TOLD,) and calls == [1]


def test_the_measured_peak_counts_every_plan_that_the_planned_one_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A step that is planned behind a larger one ends no measurement of that; a new plan of the same does."""
    monkeypatch.setattr(Counting, "peaks", [99 * MIB])  # before any plan
    device, collector = Counting("CPU:0", 64 * MIB), Collector()
    large, small = (
        replace(EDITED, name=name, policy="budget", planned_peak_bytes=peak * MIB)
        for name, peak in (("large", 40), ("small", 10))
    )

    def run(stats: GraphStats, peak: int) -> tuple[int | None, int | None]:
        collector.add(stats, planned(stats.name))
        collector.measure(stats, device)
        device.peaks[-1] = peak * MIB
        found = collector.report(device, None)
        return found.planned_peak_bytes, found.measured_peak_bytes

    assert run(large, 41) == (40 * MIB, 41 * MIB)
    assert run(small, 11) == (40 * MIB, 41 * MIB)
    assert run(large, 38) == (40 * MIB, 38 * MIB)
    assert run(replace(small, function="another trace"), 50) == (40 * MIB, 50 * MIB)
    gone = replace(collector.report(device, None), since_edit_bytes=9 * MIB, gone=frozenset([""]))
    assert gone.measured_peak_bytes == 38 * MIB  # of the large one, whose last trace is counted all the same
    device.peaks[-1] = 5 * MIB
    assert collector.report(replace(device, name="GPU:0"), None).measured_peak_bytes == 5 * MIB


def test_the_latest_graphs_alone_are_described() -> None:
    """A description holds the whole graph, and a process may make a new one all the time."""
    collector, calls = Collector(), [0]

    def describe() -> Any:
        calls[0] += 1

    for number in range(100):
        collector.postpone(replace(FITS, name=f"fits {number}"), describe)
        collector.add(replace(EDITED, name=f"edited {number}"), planned(f"edited {number}"))
    assert [one.name for one in collector.planned.values()] == [f"edited {n}" for n in range(68, 100)]
    assert calls == [32] and len(graphs(collector)) == 200


def test_a_later_plan_of_the_same_graph_stays_the_latest() -> None:
    collector, calls = described()
    collector.add(EDITED, planned("edited"))
    assert collector.latest is not None and collector.latest.name == "edited"
    assert graphs(collector) == (FITS, EDITED) and calls == [0]


def test_what_is_described_late_comes_before_what_was_planned_since() -> None:
    collector, _ = described()
    collector.add(OTHER, planned("another"))
    assert collector.latest is not None and collector.latest.name == "another"
    assert [one.name for one in collector.planned.values()] == ["fits", "another"]


def test_steps_of_one_name_keep_a_plan_each() -> None:
    collector = Collector()
    for function in ("f_1", "f_2", "f_2"):
        collector.add(replace(EDITED, function=function), replace(planned("step"), function=function))
    assert [one.function for one in collector.planned.values()] == ["f_1", "f_2"]
    for functions, found in ((["f_1"], "f_1"), (["f_2"], "f_2"), ([], "f_2"), (["f_12"], "f_2")):
        step = collector.planned_of("step", functions)
        assert step is not None and step.function == found
    assert collector.largest is collector.latest


def test_what_waits_of_one_trace_outlasts_a_plan_of_another() -> None:
    collector, calls = described()
    collector.add(replace(EDITED, function="f_2"), replace(planned("edited"), function="f_2"))
    assert [one.function for one in collector.planned.values()] == ["", "f_2"] and calls == [1]


def test_of_many_traces_of_a_step_the_latest_are_described() -> None:
    collector, calls = Collector(), [0]

    def describe() -> Any:
        calls[0] += 1
        return TOLD, planned("fits")

    for number in range(20):
        collector.postpone(replace(FITS, function=f"f_{number}"), describe)
    assert [one.function for one in collector.planned.values()] == [f"f_{n}" for n in range(16, 20)]
    assert calls == [4]


def test_counted_swaps_of_another_graph_do_not_lose_it() -> None:
    collector, _ = described()
    collector.add(OTHER, planned("another"))
    collector.executed([OTHER], 2)
    assert graphs(collector) == (TOLD, replace(OTHER, executed=2))


def test_what_cannot_be_described_stays_as_it_was() -> None:
    collector, _ = described(None)
    assert graphs(collector) == (FITS,)


def test_a_settled_report_tells_the_peak_of_ops_that_meet() -> None:
    build = GraphBuilder()
    (slope,) = build.add("begin", "Fill", outputs=[MIB])
    for layer in range(4):
        build.add(f"filter_{layer}", "Conv2DBackpropFilter", inputs=[slope], outputs=[4096], flops=1e12)
        (slope,) = build.add(f"image_{layer}", "Conv2DBackpropInput", inputs=[slope], outputs=[MIB])
    graph = build.build(kept=[slope])
    made, two = (
        replace(plan(graph, LMSConfig()), serial_edges=(SerialEdge(0, 1),)),
        replace(V100, overlaps=False, threads=2),
    )
    known = replace(planned("step"), graph=graph, plan=made, costs=two, room_bytes=64 * MIB)
    likely = known.likely_peak_bytes
    assert not made.is_empty and likely is not None and likely > 3 * MIB
    first = replace(EDITED, policy="budget", planned_peak_bytes=3 * MIB, base_bytes=MIB)
    same, least, compiled, larger = (
        replace(first),
        replace(first, policy="all"),
        replace(first, segments=1),
        replace(first, planned_peak_bytes=66 * MIB),
    )
    for latest, told in ((same, MIB + likely), (least, 3 * MIB), (compiled, 3 * MIB), (larger, 66 * MIB)):
        collector = Collector()
        collector.add(first, known)
        collector.add(latest, known)
        assert graphs(collector) == (first, replace(latest, planned_peak_bytes=told)), "only the latest"
