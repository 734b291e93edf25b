"""The figures of what LMS did in this process, as values: one entry per graph, and the whole."""

import os
from collections.abc import Callable, Container, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Any

from lms.device.device import MIB, Device, read_devices
from lms.ir.graph import Graph
from lms.ir.liveness import Buffers, Timeline, timeline
from lms.ir.swap_plan import Recomputed, SwapPlan
from lms.rewriter.streaming import Streamed
from lms.rewriter.writer import Edits
from lms.simulate.cost_model import V100, Costs
from lms.simulate.executor import likely_peak
from lms.transports.base import StoreStats


def counted(number: int, what: str) -> str:
    """Write a number with its noun: ``1 tensor``, ``2 tensors``."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


FIX_LENGTHS = (
    "where these are lengths, pad all to one (padded_batch with padded_shapes); where you know them, say so "
    "with tf.ensure_shape; the others stay on the device"
)
"""What closes sizes that are open beside the batch's; nothing does where values choose rows."""
UNROLL = "layers such as LSTM take unroll=True for inputs of one length: their turns become ops of the step"
"""The remedy for a loop."""


@dataclass(frozen=True)
class OpenSizes:
    """Tensors of a step whose size is not known, so that its peaks are not known; reads as one line."""

    count: int
    example: str
    """The name of the first."""
    by_data: bool = False
    """They stay open although the sizes of the batch are known: the values in it decide."""

    @classmethod
    def of(cls, names: Sequence[str], *, known: bool) -> "OpenSizes | None":
        """Describe the tensors ``names``; ``None`` if there are none.

        ``known`` tells whether the size of the batch is known.
        """
        return cls(len(names), names[0], known) if names else None

    @property
    def remedy(self) -> str:
        """The remedy, for the user."""
        return FIX_LENGTHS if self.by_data else "set batch_size (LMS_BATCH_SIZE)"

    def __str__(self) -> str:
        many = self.count > 1
        what = f"the {'sizes' if many else 'size'} of {counted(self.count, 'tensor')}"
        example = f"(such as {self.example})" if many else f"({self.example})"
        open_by_data = f"depend{'' if many else 's'} on the data, or on open sizes beside the batch's"
        verb = open_by_data if self.by_data else f"{'are' if many else 'is'} open"
        return f"{what} {example} {verb}; {self.remedy}"


TRACES = 4
"""The most traces of one step whose figures wait to be worked out."""
DESCRIBED = 32
"""Graphs that are described in full, the latest ones: a description holds the whole graph."""
ORDERED = "nothing is swapped: control edges between a few ops have the step fit"


@dataclass(frozen=True)
class GraphStats:
    """One graph that LMS considered. Bytes of tensors count one step."""

    name: str
    edited: bool
    why: str
    """One line: what was done, or why nothing was."""
    ops: int
    place: tuple[str, str] = ("", "")
    """The device and the frame that were planned."""
    function: str = ""
    """The function of TensorFlow's runtime that holds it, one for each trace; empty where none is known."""
    plan: int = 0
    """The number of its plan."""
    beside: frozenset[int] = frozenset()
    """The numbers of the plans before it that may run again, for other batches."""
    policy: str = ""
    """The policy that made the plan; for ``auto`` that is ``budget`` or ``all``."""
    asked_policy: str = ""
    """What the configuration asks for."""
    planned_peak_bytes: int | None = None
    """Whole device: what lay there when the graph was planned, plus the edited step's own peak; ``None``
    while sizes are open."""
    peak_before_bytes: int | None = None
    """The peak of the whole device with the unedited step."""
    open_sizes: OpenSizes | None = None
    base_bytes: int = 0
    """What lies on the device when the step begins: variables, constants, data, and Horovod's buffer."""
    step_bytes: int | None = None
    """The most that the planned step's own tensors have at once; ``None`` while sizes are open."""
    loops: int = 0
    """Loops that keep lists for their backward pass, which are in no plan."""
    fusion_bytes: int = 0
    """The part of it that is the buffer that Horovod will take in the first step."""
    budget_bytes: int | None = None
    floor_bytes: int | None = None
    """The least that the step needs; ``None`` while sizes are open."""
    tensors: int = 0
    """Tensors that are swapped out."""
    swap_ins: int = 0
    bytes_out: int = 0
    bytes_in: int = 0
    recomputed: Recomputed | None = None
    """What is made again in the backward pass; ``None``: nothing."""
    streamed: Streamed = field(default_factory=Streamed)
    """The variables whose values lie in host memory between steps."""
    segments: int = 0
    """Segments that XLA compiles."""
    compiled_ops: int = 0
    """Ops in these."""
    whole: bool = False
    """Whether XLA compiles the step as one."""
    first_run_s: float | None = None
    """The first run of a step that XLA compiles; tracing, planning and compiling are in it."""
    added_ops: int = 0
    control_edges: int = 0
    edit_s: float = 0.0
    """Reading, planning and rewriting together."""
    plan_s: float = 0.0
    measured_ops: int = 0
    """The ops of the step whose times a profile tells; 0: all are estimated."""
    seconds: tuple[tuple[str, float], ...] = ()
    """(pass, seconds) of the edit."""
    varies: bool = False
    """Whether only a run tells how often the step is made: it is in a loop or in a branch."""
    executed: int | None = None
    """The swap-outs of the run after the edit; ``None`` where nothing counts them."""
    rejected: tuple[tuple[str, int], ...] = ()
    """(reason, tensors that it kept on the device), most frequent first."""
    notes: tuple[str, ...] = ()

    @property
    def covers_all(self) -> bool:
        """Whether the plan holds all tensors of the step: none of an open size, none that a loop keeps."""
        return not self.loops and self.open_sizes is None

    @property
    def copies_out(self) -> int:
        """The copies to the host in one step."""
        return self.tensors + self.streamed.copies_out

    @classmethod
    def of(
        cls,
        name: str,
        made: SwapPlan,
        edits: Edits | None,
        base: int,
        peak: int,
        open_sizes: OpenSizes | None = None,
        streamed: Streamed | None = None,
    ) -> "GraphStats":
        """Collect the figures of a plan and its edits; ``base`` and ``peak`` are the whole device's bytes."""
        streamed = streamed or Streamed()
        known = open_sizes is None
        return cls(
            name=name,
            edited=edits is not None,
            why=ORDERED if edits and made.is_empty and not streamed.nodes else _why(made, streamed),
            ops=len(made.order),
            policy=made.policy,
            planned_peak_bytes=peak if known else None,
            peak_before_bytes=base + made.peak_before_bytes if known else None,
            open_sizes=open_sizes,
            base_bytes=base,
            step_bytes=made.peak_bytes if known else None,
            budget_bytes=made.budget_bytes,
            floor_bytes=made.floor_bytes if known else None,
            tensors=made.tensors_out,
            swap_ins=sum(len(swap.swap_ins) for swap in made.swaps),
            bytes_out=made.bytes_out,
            bytes_in=made.bytes_in,
            recomputed=made.recomputed if edits else None,
            streamed=streamed,
            added_ops=len(edits.nodes) if edits else 0,
            control_edges=edits.control_edges if edits else 0,
            rejected=tuple(made.rejected_by_reason.items()),
            notes=made.notes,
        )


def _why(made: SwapPlan, streamed: Streamed) -> str:
    if streamed.nodes:
        text = f"{counted(streamed.state + streamed.weights, 'variable')} on the host between steps"
        return f"{text}; {_why(made, Streamed())}" if made.swaps or made.recomputed else text
    if made.is_empty:
        return made.notes[0] if made.notes else "nothing is edited: no tensor can be swapped"
    out, back, again = made.bytes_out / MIB, made.bytes_in / MIB, made.recomputed
    text = "nothing is swapped"
    if made.tensors_out:
        text = (
            f"{counted(made.tensors_out, 'tensor')} swapped, {out:,.1f} MiB out and {back:,.1f} MiB in a step"
        )
    elif not again:
        return f"{text}: in the planned order of its ops the step fits"
    return f"{text}, {again.tensors:,} recomputed ({again.nbytes / MIB:,.1f} MiB)" if again else text


@dataclass(frozen=True)
class Report:
    """The report of what LMS did so far; prints as a table."""

    device: Device
    transport: str
    graphs: tuple[GraphStats, ...]
    measured_peak_bytes: int | None
    """Most bytes on the device since the last edit; ``None`` where the allocator does not count."""
    store: StoreStats
    retries: int = 0
    warnings: tuple[str, ...] = ()
    gone: frozenset[str] = frozenset()
    """Functions of TensorFlow's runtime that are no longer there: of a model that was compiled again."""
    idle: str = ""
    """The mode and the reason where LMS plans nothing in this process; the measured peak is then since its
    beginning."""
    document: Callable[["Report"], dict[str, Any]] | None = field(default=None, compare=False, repr=False)
    """Describes the report with all that is known of the planned step; ``None``: by its figures alone."""

    @property
    def edited(self) -> tuple[GraphStats, ...]:
        """The graphs that were edited, in the order in which they were traced."""
        return tuple(graph for graph in self.graphs if graph.edited)

    @property
    def open_sizes(self) -> OpenSizes | None:
        """The open sizes of the graph that has the most of them, among the latest plans of each graph."""
        found = [graph.open_sizes for graph in self._latest if graph.open_sizes]
        return max(found, key=lambda one: one.count, default=None)

    @property
    def planned_peak_bytes(self) -> int | None:
        """The largest planned peak among the latest plans of each graph; ``None`` while sizes are open."""
        if self.open_sizes:
            return None
        peaks = [graph.planned_peak_bytes for graph in self._latest]
        return max((peak for peak in peaks if peak), default=None)

    @property
    def loops(self) -> int:
        """Loops whose lists are in no planned peak."""
        return sum(graph.loops for graph in self._latest)

    @property
    def fusion_bytes(self) -> int:
        """The part of the planned peak that is Horovod's buffer, taken in the first step."""
        return max((graph.fusion_bytes for graph in self._latest), default=0)

    @property
    def _latest(self) -> tuple[GraphStats, ...]:
        """The latest figures of each graph, and of each trace and plan of it that may run again."""
        planned = [graph for graph in self.graphs if graph.policy]
        last = {_key(graph): graph for graph in planned}
        kept = [one for one in planned if one.function not in self.gone or one is last[_key(one)]]
        newest = {(_key(graph), graph.function): graph for graph in kept}
        live = {key: {one.plan, *one.beside} for key, one in newest.items()}
        kept = [one for one in kept if one.plan in live[_key(one), one.function]]
        return tuple({(_key(one), one.function, one.plan): one for one in kept}.values())

    @property
    def peak_error(self) -> float | None:
        """(measured - planned) / planned; ``None`` without both."""
        if not self.measured_peak_bytes or not self.planned_peak_bytes:
            return None
        return (self.measured_peak_bytes - self.planned_peak_bytes) / self.planned_peak_bytes

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain values for JSON, of bounded size."""
        from lms.report.document import build_document

        return build_document(self) if self.document is None else self.document(self)

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Write the report as one HTML file, which needs no network.

        Raises:
            PlaceError: If it cannot be written.
        """
        from lms.report.html import write_html

        write_html(self.to_json(), path)

    def __str__(self) -> str:
        from lms.report.render import render_report

        return render_report(self)


@dataclass(frozen=True)
class Planned:
    """A graph with its plan, kept for drawing and for explaining a failure."""

    name: str
    graph: Graph
    plan: SwapPlan
    base_bytes: int
    open_sizes: OpenSizes | None
    unedited: Graph
    """The graph as it was read."""
    costs: Costs = V100
    """The device and its link, as planned for."""
    device_type: str = "GPU"
    shapes: Mapping[str, str] = field(default_factory=dict)
    """By name the type and shape of the larger tensors, where they are known."""
    host_bytes: int = 0
    """Of variables whose values lie in host memory between steps, in both graphs."""
    function: str = ""
    """The function of TensorFlow's runtime that is called; empty where no call is known."""
    room_bytes: int | None = None
    """What the device has for the step's own tensors; ``None`` where that is not known."""

    def before(self) -> Timeline:
        """Return the memory of the unedited step."""
        from lms.schedule.op_order import executor_order

        order = executor_order(self.unedited, ahead=self.costs.overlaps)
        return timeline(Buffers.of(self.unedited), order)

    def after(self) -> Timeline:
        """Return the memory of the step as planned."""
        return timeline(Buffers.of(self.graph), self.plan.order, self.plan.swaps)

    @cached_property
    def likely_peak_bytes(self) -> int | None:
        """The step's own peak where ops meet by chance; ``None`` where they do not."""
        if self.room_bytes is None:
            return None
        return likely_peak(Buffers.of(self.graph), self.plan, self.costs, self.room_bytes)

    def largest_at_peak(self, count: int) -> list[tuple[str, int]]:
        """Return the largest tensors alive at the planned peak, with their bytes."""
        after = self.after()
        if after.peak_position is None:
            return []
        live = after.live_at(after.peak_position)[:count]
        return [(self.graph.tensor_name(stay.tensor), stay.nbytes) for stay in live]


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
        self._planned.pop(_trace(stats), None)
        self._postponed = [*self._postponed, (stats, describe)][-DESCRIBED:]

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
        others = [one for one in self._postponed if _trace(one[0]) != _trace(stats)]
        alike = [id(one) for one in others if _key(one[0]) == _key(stats)]
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
                described[_trace(stats)] = replace(found[1], function=stats.function)
        if described:
            self._planned = {**described, **self._planned}  # what was planned since is later

    def _keep(self, stats: GraphStats, planned: Planned) -> None:
        self._planned.pop(_trace(stats), None)
        self._planned[_trace(stats)] = planned
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
        ran = {_key(one) for one in planned if one.segments or one.whole}
        now = {
            id(one): replace(one, first_run_s=seconds)
            for one in self.graphs
            if _key(one) in ran and one.first_run_s is None
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
        )

    def _with_likely_peak(self, stats: GraphStats) -> GraphStats:
        """Return the figures of a latest plan that fills what it may with the peak that is likely."""
        planned, peak = self._planned.get(_trace(stats)), stats.planned_peak_bytes
        is_simple = stats.policy == "budget" and not (stats.segments or stats.whole)
        if planned is None or peak is None or not is_simple or planned.plan.is_empty:
            return stats
        if next(one for one in reversed(self.graphs) if _trace(one) == _trace(stats)) is not stats:
            return stats
        room, likely = planned.room_bytes, planned.likely_peak_bytes
        if room is None or likely is None or peak - stats.base_bytes > room:
            return stats
        return replace(stats, planned_peak_bytes=stats.base_bytes + max(likely, planned.plan.peak_bytes))


def _key(stats: GraphStats) -> Hashable:
    return stats.name, stats.place


def _trace(stats: GraphStats) -> Hashable:
    return _key(stats), stats.function


def latest_of(graphs: Iterable[GraphStats]) -> tuple[GraphStats, ...]:
    """Return the latest figures of each graph, which may have been planned several times."""
    return tuple({_key(graph): graph for graph in graphs}.values())


def report_idle(why: str) -> Report:
    """Return the report of a process in which LMS plans nothing."""
    return replace(Collector().report(read_devices(os.environ)[0], None), idle=why)
