"""Simulate a step in time: compute, copies to the host and copies back run side by side.

Each resource does one thing at a time, in the order in which the things become ready. Compute runs the ops
in plan order; an op waits for the copies it reads and for those the plan makes it wait for.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lms.ir.graph import Graph
from lms.ir.liveness import Buffers, Timeline, positions, round_up, timeline
from lms.ir.op_traits import STREAM_IN, STREAM_OUT, STREAM_TYPES
from lms.ir.swap_plan import SerialEdge, Swap, SwapIn
from lms.simulate.cost_model import Costs


@dataclass(frozen=True)
class Timing:
    """The times of a simulated step, in seconds."""

    makespan_s: float
    compute_s: float
    """The sum of the ops' own times: the makespan without any swap."""
    out_busy_s: float
    in_busy_s: float
    peak_bytes: int
    """The most device memory at once, copies in flight included."""
    starts_s: tuple[float, ...]
    """When each op started, by position in the order."""

    @property
    def stall_s(self) -> float:
        """The seconds that compute waited for copies."""
        return self.makespan_s - self.compute_s

    @property
    def slowdown(self) -> float:
        """Makespan over compute; 1.0 means that every copy was hidden."""
        return self.makespan_s / self.compute_s if self.compute_s else 1.0


@dataclass
class _Line:
    """A copy engine."""

    free_s: float = 0.0
    busy_s: float = 0.0

    def run(self, tensor: int, ready_s: float, seconds: float) -> float:
        """Copy ``tensor`` and return when that is done."""
        del tensor
        self.free_s = max(self.free_s, ready_s) + seconds
        self.busy_s += seconds
        return self.free_s


def simulate(
    buffers: Buffers,
    order: Sequence[int],
    swaps: Sequence[Swap],
    costs: Costs,
    seconds: Sequence[float] | None = None,
    edges: Iterable[SerialEdge] = (),
) -> Timing:
    """Simulate one step and return its times and its peak.

    Args:
        buffers: The graph's buffers.
        order: The ops as compute runs them.
        swaps: What is moved.
        costs: The device and its link.
        seconds: The ops' times by id, when ``costs.op_seconds`` was worked out before.
        edges: The plan's control edges; only those of variables that stream matter.
    """
    seconds = costs.op_seconds(buffers.graph) if seconds is None else seconds
    run = clock(order, swaps, costs, seconds, StreamedCopies.of(buffers.graph, edges))
    stays = timeline(buffers, order, swaps)
    peak = _peak(buffers.graph, stays, run)
    starts = tuple(run.starts[op] for op in order)
    compute = sum(seconds[op] for op in order)
    return Timing(run.now_s, compute, run.out.busy_s, run.back.busy_s, peak, starts)


@dataclass(frozen=True)
class StreamedCopies:
    """The copies of variables that stream: ops of the graph, but none that compute runs."""

    tensors: Mapping[int, tuple[str, int, int]]
    """By op its type, the tensor that it has to do with, and the bytes of that."""
    waits: dict[int, list[int]]
    """What each of these waits for, and which of these each other op waits for."""

    @classmethod
    def of(cls, graph: Graph, edges: Iterable[SerialEdge] = ()) -> "StreamedCopies | None":
        """Return the copies of a graph, with the control edges of a plan; ``None`` where there are none."""
        tensors = {}
        for op in graph.ops:
            if op.type in STREAM_TYPES:
                tensor = op.outputs[0] if op.type == STREAM_IN else op.inputs[-1]
                tensors[op.id] = op.type, graph.roots[tensor], graph.tensors[graph.roots[tensor]].nbytes or 0
        if not tensors:
            return None
        waits: dict[int, list[int]] = {op: [*graph.predecessors[op]] for op in tensors}
        for number in tensors:
            for later in graph.successors[number]:
                if later not in tensors:
                    waits.setdefault(later, []).append(number)
        for edge in edges:
            if edge.before in tensors or edge.after in tensors:
                waits.setdefault(edge.after, []).append(edge.before)
        return cls(tensors, waits)


def clock(
    order: Sequence[int],
    swaps: Sequence[Swap],
    costs: Costs,
    seconds: Sequence[float],
    streamed: StreamedCopies | None = None,
) -> "Clock":
    """Simulate only the times of a step; ``seconds`` are the ops' own times by id."""
    run = Clock(positions(order), swaps, costs, streamed)
    run.pass_ops(order, seconds)
    run.now_s = max(run.now_s, run.streamed_s)
    return run


class Clock:
    """The state of the three resources while ops go by."""

    def __init__(
        self,
        position: Sequence[int],
        swaps: Sequence[Swap],
        costs: Costs,
        streamed: StreamedCopies | None = None,
    ) -> None:
        self.out: _Line = _Line()
        self.back: _Line = _Line()
        self.now_s = 0.0
        self.starts = [0.0] * len(position)
        self.ends = [0.0] * len(position)
        self.left_s: dict[int, float] = {}
        """When the copy to the host of each tensor was done."""
        self.streamed_s = 0.0
        """When the latest of the variables that stream had come or left."""
        self._streamed = streamed
        self._costs = costs
        self._ready_s = [0.0] * len(position)
        self._leaving: dict[int, list[Swap]] = {}
        self._coming: dict[int, list[tuple[int, Swap, SwapIn]]] = {}
        self._blocks: dict[int, list[int]] = {}
        for swap in swaps:
            self._leaving.setdefault(swap.after, []).append(swap)
            for blocked in swap.blocks:
                self._blocks.setdefault(blocked, []).append(swap.tensor)
            for swap_in in swap.swap_ins:
                first = min(position[use.op] for use in swap_in.uses)
                self._coming.setdefault(swap_in.trigger, []).append((first, swap, swap_in))
        self._copying = self._leaving.keys() | self._coming.keys()

    def pass_ops(self, order: Sequence[int], seconds: Sequence[float]) -> None:
        """Run the ops; ``seconds`` are their own times by id."""
        starts, ends, ready_s, blocks, left_s = (
            self.starts,
            self.ends,
            self._ready_s,
            self._blocks,
            self.left_s,
        )
        copying = self._copying
        streams: Mapping[int, object] = {} if self._streamed is None else self._streamed.tensors
        waits = {} if self._streamed is None else self._streamed.waits
        for op in order:
            if op in streams:
                self._stream(op)
                continue
            start_s = self.now_s if self.now_s > ready_s[op] else ready_s[op]
            if op in waits:
                start_s = max(start_s, *(ends[other] for other in waits[op]))
            if op in blocks:
                start_s = max(start_s, *(left_s[tensor] for tensor in blocks[op]))
            starts[op] = start_s
            self.now_s = ends[op] = start_s + seconds[op]
            if op in copying:
                self._start_copies(op)

    def _stream(self, op: int) -> None:
        """Let a variable come, or leave, once what it waits for is done; compute goes on meanwhile."""
        assert self._streamed is not None  # noqa: S101 - else no op would be one of its
        kind, tensor, nbytes = self._streamed.tensors[op]
        done_s = max((self.ends[other] for other in self._streamed.waits[op]), default=0.0)
        self.starts[op] = done_s
        if kind == STREAM_IN:
            done_s = self.back.run(tensor, done_s, self._costs.in_seconds(nbytes))
        elif kind == STREAM_OUT:
            done_s = self.out.run(tensor, done_s, self._costs.out_seconds(nbytes))
        self.ends[op] = done_s
        self.streamed_s = max(self.streamed_s, done_s)

    def _start_copies(self, op: int) -> None:
        """Queue the copies that may start after ``op`` on their copy engines."""
        for swap in self._leaving.get(op, ()):
            self.left_s[swap.tensor] = self.out.run(
                swap.tensor, self.now_s, self._costs.out_seconds(swap.nbytes)
            )
        coming = [
            (max(self.now_s, self.left_s[swap.tensor]), first, swap.tensor, swap, swap_in)
            for first, swap, swap_in in self._coming.get(op, ())
        ]
        for ready_s, _, _, swap, swap_in in sorted(coming, key=lambda entry: entry[:3]):
            done_s = self.back.run(swap.tensor, ready_s, self._costs.in_seconds(swap.nbytes))
            for waiting in (*(use.op for use in swap_in.uses), *swap_in.blocks):
                self._ready_s[waiting] = max(self._ready_s[waiting], done_s)


class Stay(NamedTuple):
    """One stay of a buffer on the device, in seconds, with the points of the plan at its ends."""

    tensor: int
    nbytes: int
    begin_s: float
    end_s: float
    first: int
    last: int


def stays_in_time(planned: Timeline, run: Clock) -> Iterator[Stay]:
    """Yield the planned stays in time: a buffer stays until its copy is really done."""
    order, end = planned.order, 2 * len(planned.order) - 1
    on_host: set[int] = set()
    for stay in planned.residencies:
        begin_s = run.ends[order[stay.first // 2]] if stay.first % 2 else run.starts[order[stay.first // 2]]
        if stay.last == end:
            end_s = run.now_s
        else:
            end_s = (
                run.starts[order[stay.last // 2 + 1]] if stay.last % 2 else run.ends[order[stay.last // 2]]
            )
        copied_s = run.left_s.get(stay.tensor, 0.0)
        if stay.tensor in on_host:  # it comes back, which needs the whole copy
            begin_s = max(begin_s, copied_s)
        elif copied_s:
            on_host.add(stay.tensor)
            end_s = max(end_s, copied_s)
        yield Stay(stay.tensor, stay.nbytes, begin_s, end_s, stay.first, stay.last)


def _peak(graph: Graph, planned: Timeline, run: Clock) -> int:
    """Return the peak in time.

    At the same instant, what ends at an earlier point of the plan goes before what starts at a later one.
    """
    events: list[tuple[float, int, int]] = []
    for _, nbytes, begin_s, end_s, first, last in stays_in_time(planned, run):
        events += [(begin_s, 2 * first, nbytes), (end_s, 2 * last + 1, -nbytes)]
    for place, op in enumerate(planned.order):
        scratch = round_up(graph.ops[op].workspace_bytes)
        if scratch:
            events += [(run.starts[op], 4 * place, scratch), (run.ends[op], 4 * place + 1, -scratch)]
    live = peak = 0
    for _, _, nbytes in sorted(events):
        live += nbytes
        peak = max(peak, live)
    return peak


class _NotedLine(_Line):
    """A copy engine that keeps what it has copied."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[tuple[int, float, float]] = []

    def run(self, tensor: int, ready_s: float, seconds: float) -> float:
        done_s = super().run(tensor, ready_s, seconds)
        self.copies.append((tensor, done_s - seconds, done_s))
        return done_s


class NotedClock(Clock):
    """A clock that keeps each copy: tensor, begin and end in seconds."""

    def __init__(
        self,
        position: Sequence[int],
        swaps: Sequence[Swap],
        costs: Costs,
        streamed: StreamedCopies | None = None,
    ) -> None:
        super().__init__(position, swaps, costs, streamed)
        self.out, self.back = self._noted = _NotedLine(), _NotedLine()

    @property
    def copies_out(self) -> list[tuple[int, float, float]]:
        """The copies to the host."""
        return self._noted[0].copies

    @property
    def copies_back(self) -> list[tuple[int, float, float]]:
        """The copies back to the device."""
        return self._noted[1].copies
