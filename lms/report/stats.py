"""The figures of what LMS did in this process, as values: one entry per graph, and the whole."""

import os
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from lms.device.device import MIB, Device
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
    "with tf.ensure_shape"
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
    """Loops that keep lists of unknown size for their backward pass, which are in no plan."""
    lists: int = 0
    """The lists of loops among the swapped tensors, each as one tensor."""
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
        """Tell whether the plan holds all tensors: none of an open size, none that a loop keeps."""
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
class _Made:
    """A document of a report that was made in another process."""

    document: dict[str, Any]

    def __call__(self, _report: "Report") -> dict[str, Any]:
        """Return the document."""
        return self.document


@dataclass(frozen=True)
class Report:
    """The report of what LMS did so far; prints as a table."""

    device: Device
    transport: str
    graphs: tuple[GraphStats, ...]
    since_edit_bytes: int | None
    """Most bytes on the device since the last edit; ``None`` where the allocator does not count."""
    store: StoreStats
    retries: int = 0
    warnings: tuple[str, ...] = ()
    gone: frozenset[str] = frozenset()
    """Functions of TensorFlow's runtime that are no longer there: of a model that was compiled again."""
    idle: str = ""
    """The mode and the reason where LMS plans nothing in this process; the measured peak is then since its
    beginning."""
    earlier_peaks: Mapping[Hashable, int] = field(default_factory=dict)
    """By trace (:func:`trace_key`) the most bytes on the device between its latest plan and another's."""
    document: Callable[["Report"], dict[str, Any]] | None = field(default=None, compare=False, repr=False)
    """Describes the report with all that is known of the planned step; ``None``: by its figures alone."""

    def __getstate__(self) -> dict[str, Any]:
        """Take the document along to another process, for the planned step stays in this one."""
        return {**self.__dict__, "document": None if self.document is None else _Made(self.to_json())}

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
    def measured_peak_bytes(self) -> int | None:
        """Return the most bytes on the device under the plans that :attr:`planned_peak_bytes` counts.

        ``None`` where the allocator does not count.
        """
        if self.since_edit_bytes is None:
            return None
        kept = {trace_key(graph) for graph in self._latest}
        earlier = [peak for key, peak in self.earlier_peaks.items() if key in kept]
        return max([self.since_edit_bytes, *earlier])

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
        last = {graph_key(graph): graph for graph in planned}
        kept = [one for one in planned if one.function not in self.gone or one is last[graph_key(one)]]
        newest = {trace_key(graph): graph for graph in kept}
        live = {key: {one.plan, *one.beside} for key, one in newest.items()}
        kept = [one for one in kept if one.plan in live[trace_key(one)]]
        return tuple({(trace_key(one), one.plan): one for one in kept}.values())

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


def graph_key(stats: GraphStats) -> Hashable:
    """Return what the figures of a graph have in common, however often it is traced and planned."""
    return stats.name, stats.place


def trace_key(stats: GraphStats) -> Hashable:
    """Return what the figures of one trace of a graph have in common, however often it is planned."""
    return graph_key(stats), stats.function


def latest_of(graphs: Iterable[GraphStats]) -> tuple[GraphStats, ...]:
    """Return the latest figures of each graph, which may have been planned several times."""
    return tuple({graph_key(graph): graph for graph in graphs}.values())
