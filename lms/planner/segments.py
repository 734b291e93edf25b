"""Put ops that XLA can compile into segments, and plan the step that is made of these.

XLA allocates what a cluster of ops makes when the cluster starts, and frees what it reads when it is done. So
a swap can only take place between clusters, and a cluster that is too large needs more memory than its ops
one by one. Segments are therefore chosen first: runs of neighbours in an order that keeps memory low, each
within a number of bytes. In the graph that is planned each is one op, with what XLA needs inside of it as its
scratch memory. To the planner and the simulators that is a graph like any other, so no plan can swap inside
of a segment, and every plan counts what segments need.

A segment holds no two ops with one between them that is left out: compiled together they would have to run
both before and after it. Nor does it hold an op and another that repeats it: XLA would make one of them.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush
from types import MappingProxyType
from typing import NamedTuple

from lms.config import LMSConfig
from lms.ir.graph import Graph, Op, Tensor, Use
from lms.ir.liveness import Buffers, round_up
from lms.ir.op_traits import CONTRACTIONS, is_update
from lms.planner.host_operands import Decision, plan_swaps
from lms.planner.hybrid import score
from lms.schedule.op_order import early_ops, floating_ops
from lms.simulate.cost_model import REDUCTIONS, Costs, costs_of
from lms.swaps.budget import NO_STALL
from lms.swaps.swap_planner import LEAVES_WHAT_FITS, usable_bytes

SEGMENT = "LmsSegment"
"""Type of the op that stands for a segment."""

FEWEST_OPS = 2
"""A segment of fewer ops that compute anything is left to TensorFlow's own kernels."""

FEWEST_BYTES = 64 * 1024
"""So is one whose ops make less: Adam's rate for a variable is nine ops on single numbers."""

SPARE = 0.5
"""The share of the margin that a plan with segments leaves free, even where the simulated allocator needs it.
What a segment needs inside is estimated, and wanted in one piece."""

WHOLE = 2.5
"""What a step compiled as one may need, as a multiple of the plan's peak: 0.9 to 2.1 times were measured. Its
schedule is XLA's own, which is not known before it is compiled, and its temporaries lie in one piece. Where
memory runs out all the same, XLA has freed the variables that it was to update, and no step can follow."""

OWN_ORDER = 2.0
"""What a segment may need inside, as a multiple of what its ops need in the plan's order: XLA runs them in an
order of its own. 0 to 2.8 times were measured; with 1 every other plan near its limit ran out of memory."""

SHARES = (1.0, 0.7, 0.5, 0.35, 0.25, 0.15, 0.1)
"""The working sets of segments that are tried, as shares of what the step may use."""

CHECKS = 16
"""A segment is measured again whenever it has grown by this part of its ops."""

CALL_S = 1e-4
"""The time of TensorFlow's call of a segment beside that of its kernels: assumed, not measured."""

MORE = 1.05
"""A plan with segments may need this many times the memory of the plan without."""


@dataclass(frozen=True)
class Segmentation:
    """A graph in which each segment is one op, and where its ops and tensors come from."""

    before: Graph
    graph: Graph
    ops: tuple[tuple[int, ...], ...]
    """For each op those of the graph before that it stands for, in the order in which they stood."""
    tensors: tuple[int, ...]
    """For each tensor the one of the graph before."""
    uses: tuple[tuple[Use, ...], ...]
    """For each op the uses of the graph before that its inputs stand for."""

    @property
    def segments(self) -> tuple[int, ...]:
        """The ops that are segments, ascending."""
        return tuple(op.id for op in self.graph.ops if op.type == SEGMENT)

    @property
    def compiled(self) -> int:
        """The number of ops that are in segments."""
        return sum(len(self.ops[op]) for op in self.segments)


class _Fused(NamedTuple):
    """Holds the buffers that XLA need not write where it compiles all that use them."""

    roots: frozenset[int]
    """Holds what elementwise ops make for others but contractions: XLA computes it where it is read."""
    summed: frozenset[int]
    """Holds those of ``roots`` that are written all the same. On a CPU XLA sums in windows, which read what
    has been written: a step's loss took a buffer of its size there."""


@dataclass
class _Run:
    """A segment as far as it has come, with the ops that stand between its own in the order."""

    ops: list[int] = field(default_factory=list)
    before: list[int] = field(default_factory=list)
    """Left-out ops that wait for none of the segment's."""
    behind: list[int] = field(default_factory=list)
    """Left-out ops that do."""


def segmented(
    buffers: Buffers,
    order: Sequence[int],
    compilable: Collection[int],
    most_bytes: int | None,
    device_type: str,
    costs: Costs,
    repeats: Mapping[int, int] = MappingProxyType({}),
) -> Segmentation:
    """Put neighbours of an order into segments.

    Args:
        buffers: Those of the graph.
        order: An order of its ops.
        compilable: The ops that may be in a segment.
        most_bytes: The most that a segment reads, makes and needs inside; ``None``: any number. It is
            measured now and then (:data:`CHECKS`), so a segment may need a little more.
        device_type: ``CPU`` or ``GPU``.
        costs: The device.
        repeats: For each op that repeats another that one.
    """
    fused = _fused(buffers, device_type)
    runs = _runs(buffers, order, compilable, most_bytes, repeats, fused)
    groups = (group for run in runs for group in _groups(buffers, run))
    return _contracted(buffers, tuple(groups), costs, fused)


def _runs(
    buffers: Buffers,
    order: Sequence[int],
    compilable: Collection[int],
    most_bytes: int | None,
    repeats: Mapping[int, int],
    fused: _Fused,
) -> Iterator[_Run]:
    graph = buffers.graph
    run, own, behind, check = _Run(), set[int](), set[int](), 1
    for op in order:
        before = graph.predecessors[op]
        waits = not behind.isdisjoint(before)
        if op in compilable and not (waits and _makes_little(buffers, op)):
            is_full = waits or repeats.get(op) in own
            if not is_full and len(run.ops) >= check:
                is_full = most_bytes is not None and _needs(buffers, [*run.ops, op], fused) > most_bytes
                check = len(run.ops) + 1 + len(run.ops) // CHECKS
            if is_full:
                yield run
                run, own, behind, check = _Run(), set(), set(), 1
            run.ops.append(op)
            own.add(op)
        elif own.isdisjoint(before) and not waits:
            run.before.append(op)
        else:
            run.behind.append(op)
            behind.add(op)
    yield run


def _makes_little(buffers: Buffers, op: int) -> bool:
    """Tell whether an op alone is not worth a cut, as one that computes a metric is not."""
    return sum(buffers.nbytes[root] for root in buffers.graph.ops[op].outputs) < FEWEST_BYTES


def _needs(buffers: Buffers, ops: Sequence[int], fused: _Fused) -> int:
    """Return the bytes that a segment reads, makes and needs inside."""
    graph, own = buffers.graph, set(ops)
    read = {root for op in ops for root in buffers.reads[op] if graph.tensors[root].op not in own}
    made = [graph.roots[tensor] for tensor in _left(buffers, ops)]
    return sum(buffers.nbytes[root] for root in (*read, *made)) + _scratch(buffers, ops, fused)


def _left(buffers: Buffers, ops: Sequence[int]) -> list[int]:
    """Return the tensors that ops make for others."""
    graph, own = buffers.graph, set(ops)
    return [
        tensor
        for op in ops
        for tensor in graph.ops[op].outputs
        if tensor in graph.kept or any(use.op not in own for use in graph.uses[tensor])
    ]


def _scratch(buffers: Buffers, ops: Sequence[int], fused: _Fused) -> int:
    """Return what XLA needs inside of a segment in an order of its own, and at least what it must write."""
    roots = fused.roots
    written = _inside(buffers, ops, roots - fused.summed) if fused.summed else 0
    return max(int(OWN_ORDER * _inside(buffers, ops, roots)), written)


def _inside(buffers: Buffers, ops: Sequence[int], fused: Collection[int]) -> int:
    """Return the most bytes of buffers that ops make for each other alone, and of their scratch memory."""
    graph, own = buffers.graph, set(ops)
    leaving = {graph.roots[tensor] for tensor in _left(buffers, ops)}
    nowhere = leaving.union(fused)
    last: dict[int, int] = {}
    for op in ops:
        for root in buffers.reads[op]:
            last[root] = op
    live = most = 0
    for op in ops:
        made = [root for root in graph.ops[op].outputs if buffers.nbytes[root] and root not in nowhere]
        live += sum(buffers.nbytes[root] for root in made)
        most = max(most, live + round_up(graph.ops[op].workspace_bytes))
        live -= sum(
            buffers.nbytes[root]
            for root in buffers.reads[op]
            if last[root] == op and graph.tensors[root].op in own and root not in nowhere
        )
    return most


def _fused(buffers: Buffers, device_type: str) -> _Fused:
    graph = buffers.graph
    types = {
        root: [graph.ops[user].type for user in buffers.users[root]]
        for op in graph.ops
        if op.in_place
        for root in op.outputs
    }
    roots = frozenset(root for root, users in types.items() if not any(map(_contracts, users)))
    sums = REDUCTIONS if device_type == "CPU" else frozenset[str]()
    return _Fused(roots, frozenset(root for root in roots if not sums.isdisjoint(types[root])))


def _contracts(op_type: str) -> bool:
    return any(part in op_type for part in CONTRACTIONS)


def _groups(buffers: Buffers, run: _Run) -> Iterator[tuple[int, ...]]:
    """Yield the ops of a run in an order, those of the segment as one group."""
    graph, views = buffers.graph, buffers.graph.views
    kept = list(run.ops)
    first: list[int] = []
    for op in run.ops:  # a view of what is there already takes no memory, unless XLA has to copy it
        if op in views and not set(kept).difference((op,)) & set(graph.predecessors[op]):
            kept.remove(op)
            first.append(op)
    last: list[int] = []
    for op in reversed(run.ops):
        if op in kept and op in views and not set(graph.successors[op]) & set(kept):
            kept.remove(op)
            last.append(op)
    # An op's number is above those of all that it waits for.
    parts = [part for part in _connected(graph, kept) if _is_worth_it(buffers, part)]
    alone = set(kept).difference(*parts)
    yield from _in_order(
        graph, [*((op,) for op in (*run.before, *first, *alone, *last, *run.behind)), *parts]
    )


def _is_worth_it(buffers: Buffers, part: Sequence[int]) -> bool:
    """Tell whether a segment is worth its call."""
    graph = buffers.graph
    count = sum(op not in graph.views for op in part)
    nbytes = sum(buffers.nbytes[graph.roots[tensor]] for op in part for tensor in graph.ops[op].outputs)
    return count >= FEWEST_OPS and nbytes >= FEWEST_BYTES


def updating_ops(graph: Graph) -> frozenset[int]:
    """Find the elementwise ops that work for the update of a variable alone.

    In a segment they would cut it: an optimizer changes one slot of a variable and goes on with what it reads
    of that, so that a segment of the backward pass would end with each layer.
    """
    found: set[int] = set()
    for op in reversed(graph.ops):
        readers = graph.successors[op.id]
        serves = bool(readers) and all(one in found or is_update(graph.ops[one].type) for one in readers)
        if serves and (op.in_place or op.id in graph.views):
            found.add(op.id)
    return frozenset(found)


def _connected(graph: Graph, ops: Collection[int]) -> list[tuple[int, ...]]:
    """Return the parts of a set of ops that are connected: TensorFlow merges ops along edges alone."""
    own, found, seen = set(ops), [], set[int]()
    for op in sorted(ops):
        if op in seen:
            continue
        part, open_ops = {op}, [op]
        while open_ops:
            one = open_ops.pop()
            new = own.intersection((*graph.predecessors[one], *graph.successors[one])) - part
            part |= new
            open_ops += new
        seen |= part
        found.append(tuple(sorted(part)))
    return found


def _in_order(graph: Graph, groups: Sequence[tuple[int, ...]]) -> Iterator[tuple[int, ...]]:
    """Yield groups of ops, each behind those that it waits for, and else by their first ops."""
    of = {op: number for number, group in enumerate(groups) for op in group}
    waits: list[set[int]] = []
    behind: list[set[int]] = [set() for _ in groups]
    for number, group in enumerate(groups):
        before = {of[other] for op in group for other in graph.predecessors[op] if other in of} - {number}
        waits.append(before)
        for other in before:
            behind[other].add(number)
    ready = [(group[0], number) for number, group in enumerate(groups) if not waits[number]]
    heapify(ready)
    while ready:
        number = heappop(ready)[1]
        yield groups[number]
        for later in behind[number]:
            waits[later].discard(number)
            if not waits[later]:
                heappush(ready, (groups[later][0], later))


def _contracted(
    buffers: Buffers, groups: Sequence[tuple[int, ...]], costs: Costs, fused: _Fused
) -> Segmentation:
    before, seconds = buffers.graph, costs.op_seconds(buffers.graph)
    number: dict[int, int] = {}
    now: dict[int, int] = {}
    ops: list[Op] = []
    tensors: list[Tensor] = []
    old_tensors: list[int] = []
    uses: list[tuple[Use, ...]] = []
    for place, group in enumerate(groups):
        own = set(group)
        is_segment = len(group) > 1
        number.update(dict.fromkeys(group, place))
        found = tuple(
            Use(op, slot)
            for op in group
            for slot, tensor in enumerate(before.ops[op].inputs)
            if before.tensors[tensor].op not in own
        )
        read = tuple(now[before.ops[use.op].inputs[use.slot]] for use in found)
        left = _left(buffers, group) if is_segment else before.ops[group[0]].outputs
        made = tuple(range(len(tensors), len(tensors) + len(left)))
        for index, (tensor, old) in enumerate(zip(made, left, strict=True)):
            now[old] = tensor
            known = before.tensors[old]
            alias = None if known.alias_of is None or is_segment else now[known.alias_of]
            nbytes = before.tensors[before.roots[old]].nbytes if is_segment else known.nbytes
            tensors.append(known._replace(id=tensor, op=place, index=index, alias_of=alias, nbytes=nbytes))
            old_tensors.append(old)
        waits = {number[control] for op in group for control in before.ops[op].controls} - {place}
        one = before.ops[group[0]]
        if is_segment:
            one = Op(
                place,
                f"{one.name}/{SEGMENT}",  # no time of one op is that of the segment
                SEGMENT,
                read,
                made,
                workspace_bytes=_scratch(buffers, group, fused),
                flops=costs.flops_per_s * _segment_s(buffers, group, seconds, fused),
            )
        ops.append(one._replace(id=place, inputs=read, outputs=made, controls=tuple(sorted(waits))))
        uses.append(found)
    kept = frozenset(now[tensor] for tensor in before.kept)
    backward = frozenset(number[op] for op in before.backward)
    graph = Graph(tuple(ops), tuple(tensors), kept, backward)
    return Segmentation(before, graph, tuple(groups), tuple(old_tensors), tuple(uses))


def _segment_s(buffers: Buffers, ops: Sequence[int], seconds: Sequence[float], fused: _Fused) -> float:
    """Return the time of a segment: that of its ops but those that XLA computes where others read them.

    By this a ViT-L takes 0.63 and a GPT-2 medium 0.56 of the time without XLA on an H100. Measured there were
    0.53 for a ViT of six layers (``docs/measurements.md``).
    """
    roots = buffers.graph.roots
    leaving = {roots[tensor] for tensor in _left(buffers, ops)}
    kernels = (
        op
        for op in ops
        if any(
            roots[tensor] in leaving or roots[tensor] not in fused.roots
            for tensor in buffers.graph.ops[op].outputs
        )
    )
    return CALL_S + sum(seconds[op] for op in kernels)


def fits_whole(plain: Decision, config: LMSConfig, limit_bytes: int | None) -> bool:
    """Tell whether XLA may compile a step as one.

    Args:
        plain: The plan for the step without XLA.
        config: Policy and parameters.
        limit_bytes: What the device has for the step's own tensors; ``None`` when that is not known.
    """
    if config.policy not in LEAVES_WHAT_FITS or not (plain.plan.is_empty and plain.plan.feasible):
        return False
    room = usable_bytes(config, limit_bytes)
    changed = plain.relocation is not None or plain.recomputation is not None
    return not changed and (room is None or WHOLE * plain.plan.peak_bytes <= room)


def plan_segments(
    graph: Graph,
    compilable: Collection[int],
    config: LMSConfig,
    device_type: str,
    limit_bytes: int | None,
    costs: Costs | None = None,
    plain: Decision | None = None,
) -> Decision:
    """Plan the swaps of a step that runs in segments.

    The larger segments are, the more XLA can fuse, and the more memory they need; copies run beside others
    than their own. So segments of some sizes are planned, and the fastest plan with which the step fits is
    taken. Where memory counts first, it is the one with the largest segments that needs hardly more memory
    than a plan without. Where there is none, it is the plan without.

    Args:
        graph: The step.
        compilable: The ops that XLA can compile.
        config: Policy and parameters.
        device_type: ``CPU`` or ``GPU``.
        limit_bytes: What the device has for the step's own tensors; ``None`` when that is not known.
        costs: The device and its link; the default is a common one of its type.
        plain: The plan without segments, where there is one already: ops that it repeats are repeated in
            segments, too.
    """
    costs = costs or costs_of(device_type)
    plain = plain or plan_swaps(graph, config, device_type, limit_bytes, costs)
    repeats: dict[int, int] = {}
    if (repeated := plain.recomputation) is not None:
        graph = repeated.graph
        compilable = [op for op, source in enumerate(repeated.ops) if source in compilable]
        repeats = {op: repeated.places[repeated.ops[op]] for op in repeated.repeated}
    buffers = plain.case.buffers if plain.relocation is None else Buffers.of(graph)
    order = plain.plan.order if plain.relocation is None else range(len(graph.ops))
    may = frozenset(compilable) - floating_ops(graph) - early_ops(graph) - updating_ops(graph)
    room = usable_bytes(config, limit_bytes)
    tight = config.policy == "all" or not plain.plan.feasible or room is None
    most = int(plain.plan.peak_bytes * MORE) if tight else room
    unbound = room is None and config.policy != "all"
    best = plain
    for share in SHARES:
        most_bytes = None if unbound else int(share * (most or 0))
        made = segmented(buffers, order, may, most_bytes, device_type, costs, repeats)
        if not made.segments:
            break
        found = plan_swaps(made.graph, config, device_type, limit_bytes, costs, plain.case.peak_before_bytes)
        fits = limit_bytes is None or found.peak_bytes <= limit_bytes * (1 - config.margin * SPARE)
        if fits and (unbound or found.plan.peak_bytes <= (most or 0)):
            swaps = replace(found.plan, recomputed=plain.plan.recomputed)
            found = replace(found, plan=swaps, segmentation=made, recomputation=repeated)
            is_faster = best is plain or score(found, limit_bytes) < score(best, limit_bytes)
            best = found if is_faster else best
            if tight or best.case.makespan_s(best.plan) <= NO_STALL * sum(best.case.seconds):
                break
    return best
