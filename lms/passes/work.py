"""The values that the passes of the engine hand to each other, and how passes run."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from lms.config import LMSConfig
from lms.device.device import Device, kernels_of
from lms.ir.graph import Graph
from lms.ir.name_filters import Unmatched
from lms.optimizer.grappler_item import Output
from lms.optimizer.plugin import Request
from lms.planner.host_operands import Decision
from lms.reader.function_bodies import body_peak
from lms.reader.node_table import NodeTable
from lms.reader.shapes import ShapeHints
from lms.reader.step_reader import Step
from lms.reader.survey import Place
from lms.report.guest import Guest
from lms.rewriter.stacking import Stacked
from lms.rewriter.streaming import Streamed
from lms.rewriter.sum_order import Beginning
from lms.rewriter.writer import Edits


@dataclass(frozen=True)
class Specialised:
    """Tells what a graph has become by what its call knows."""

    outputs: Mapping[str, list[Output]] = field(default_factory=dict)
    """Type and shape of what new nodes make, by their names."""
    like: Mapping[str, str] = field(default_factory=dict)
    """The nodes whose shape is that of another node's output, which is named as inputs are."""
    sums: Mapping[str, Beginning] | None = None
    """Tells by name what sums begin with in the step as it was; ``None``: it is as it was."""


@dataclass(frozen=True)
class Task:
    """A graph to plan, and what only its call knows."""

    request: Request
    name: str
    """What its user calls it."""
    config: LMSConfig
    hints: ShapeHints = field(default_factory=ShapeHints)
    function: str = ""
    """The function of TensorFlow's runtime that is called; empty where no call is known."""
    inputs: Sequence[Any] = ()
    """The tensors that the function is called with."""
    plan: int = 0
    """The number of the plan among those of the called function."""
    tried: bool = False
    """Tells whether its plan has just run apart from other ranks, and runs with them now."""
    beside: frozenset[int] = frozenset()
    """The numbers of its plans for other batches, which may run again."""
    shared: Mapping[str, int] = field(default_factory=dict)
    """Bytes of each variable of a session that shares memory, by the name of its handle."""
    predicates: Mapping[str, bool] | None = None
    """Maps fed nodes that decide conditions to their values; ``None``: the graph keeps its conditions."""
    specialised: Specialised = field(default_factory=Specialised)
    """Tells what its call has made of the graph before it is planned."""
    is_body: bool = False
    """Whether the graph is that of another function, which the called one runs."""
    guest: Guest | None = None
    """The guest that is told of the plan, in place of the engine's own."""
    limit_bytes: int | None = None
    """The size of the device to plan for; ``None``: that of the real one."""
    compiled: bool = False
    """Whether the step's user has XLA compile it."""
    may_be_whole: bool = False
    """Whether XLA may compile it as one, as its user asked, where nothing needs to be swapped."""


@dataclass(frozen=True)
class Residents:
    """The bytes that lie on the device when the step begins."""

    in_use: int = 0
    pending: tuple[int, ...] = ()
    """Of each variable that gets its memory in the step: its first value, or one that it shares no more."""
    constants: int = 0
    fusion: int = 0
    """Of the buffer that Horovod will take."""

    @property
    def nbytes(self) -> int:
        """The sum of all of them."""
        return self.in_use + sum(self.pending) + self.constants + self.fusion


def place_of(device: Device, environ: Mapping[str, str]) -> Place:
    """Describe a device of this process as readers of graphs see it."""
    kernels = kernels_of(device, environ)
    return Place(device.holds, kernels, device.type, device.keeps_on_host, device.reads_on_host, body_peak)


@dataclass(frozen=True)
class Work:
    """One frame of a graph on one device, as far as the passes have come."""

    task: Task
    device: Device
    place: Place
    frame: int | None = None
    graph_def: Any = None
    table: NodeTable | None = None
    outputs: Sequence[Sequence[Output]] = ()
    fetches: tuple[str, ...] = ()
    """The names of outputs that outlive the step."""
    sums: Mapping[str, Beginning] | None = None
    """Tells by name what sums begin with, where specialising or ``Holding`` may change that."""
    fits: bool = False
    """Whether nothing needs to be edited, as can be told without reading the step."""
    most_bytes: int | None = None
    """Bounds what any order of its ops takes, where it fits for that."""
    whole: bool = False
    """Whether XLA shall compile the step as one."""
    later: "Callable[[], Work] | None" = None
    """Reads and plans the step all the same, where somebody asks for its figures."""
    held_bytes: int = 0
    """About how many bytes the step may take more without the control edges that :class:`Holding` adds."""
    step: Step | None = None
    graph: Graph | None = None
    """The step with a reason at each tensor that the filters keep."""
    unmatched: tuple[Unmatched, ...] = ()
    residents: Residents = field(default_factory=Residents)
    streamed: Streamed = field(default_factory=Streamed)
    """The variables whose values lie in host memory between steps."""
    stacked: Stacked = field(default_factory=Stacked)
    """The lists of loops that are tensors while they wait for the backward pass."""
    decision: Decision | None = None
    edits: Edits | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)
    """By pass."""

    @property
    def lacks_room_in_pieces(self) -> bool:
        """Tell whether a plan keeps to its budget, and its buffers find no room all the same.

        A step without a plan has not been planned for less, and says nothing of that.
        """
        decided, limit = self.decision, self.limit_bytes
        if decided is None or limit is None or decided.plan.is_empty:
            return False
        return decided.plan.feasible and decided.peak_bytes > limit

    @property
    def limit_bytes(self) -> int | None:
        """The bytes that the device has for the step's own tensors; ``None`` where they are not known."""
        whole = self.device.limit_bytes
        return None if whole is None else max(1, whole - self.residents.nbytes)

    @property
    def stored_bytes(self) -> int:
        """The bytes that the store holds at once: swapped tensors, and variables that stream, old and new."""
        swapped = self.decision.plan.bytes_out if self.decision is not None else 0
        return swapped + self.streamed.nbytes + self.streamed.bytes_out

    def reopened(self) -> "Work":
        """Return the start of the work on another frame: the graph as this work has left it."""
        table = None if self.edits else self.table
        begun = Work(self.task, self.device, self.place, graph_def=self.graph_def, table=table)
        return replace(begun, outputs=self.outputs, fetches=self.fetches)

    def of_frame(self, name: str) -> "Work":
        """Return the same work for the frame called ``name``."""
        assert self.table is not None  # noqa: S101 - a graph that has been read
        return replace(self, frame=[frame.name for frame in self.table.frames].index(name))


class Pass(Protocol):
    """One pass over a graph."""

    @property
    def name(self) -> str:
        """The pass's name in the report of times."""

    def requires(self, work: Work) -> bool:
        """Tell whether the pass has anything to do."""

    def apply(self, work: Work) -> Work:
        """Return the work with what this pass adds to it."""


def run_passes(passes: Iterable[Pass], work: Work) -> Work:
    """Run and time those passes that find something to do."""
    for one in passes:
        if one.requires(work):
            began = time.perf_counter()
            work = one.apply(work)
            spent = work.seconds.get(one.name, 0.0) + time.perf_counter() - began
            work = replace(work, seconds={**work.seconds, one.name: spent})
    return work
