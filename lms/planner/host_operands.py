"""Relocate ops that only move data: they read their operands from the host.

A concatenation or a slice needs its operands and its result on the device at once, and in a U-Net nothing
else needs as much. What it does is a copy, and a swap-in is a copy too: so its operands are sent to the host,
and the op reads them there.

On a CPU device the op itself reads what was sent. A kernel of a GPU cannot, so there the op runs on the host,
and its result is copied to the device in place of its operands.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from lms.config import LMSConfig
from lms.ir.graph import Graph, Op, Tensor
from lms.ir.swap_plan import Sent, SwapPlan
from lms.planner.fragmentation import plan_in_pieces
from lms.planner.recomputation import Recomputation
from lms.planner.room import Room, predicted_peak
from lms.simulate.cost_model import Costs
from lms.swaps.case import Case

if TYPE_CHECKING:
    from lms.planner.segments import Segmentation

MOVERS = frozenset(("ConcatV2", "Pad", "PadV2", "Slice", "Split", "SplitV", "StridedSlice", "Transpose"))
"""Ops whose results hold nothing but the bytes of their inputs, and at most one constant."""

SHARE = 0.5
"""Of the largest working set: how much a concatenation needs that is worth reading from the host. With the
U-Nets of ``bench/models.py`` 0.3 to 0.7 give nearly the same plans."""

SEND, FETCH = "LmsSend", "LmsFetch"
"""Types of the ops that stand for a copy to the host and one back in a relocated graph."""

HELD = "a copy on the host"
"""The reason why a tensor is not swapped that lies on the host already."""


@dataclass(frozen=True)
class HostRead:
    """An op that reads inputs from the host."""

    op: int
    slots: Mapping[int, int]
    """The inputs that it reads there, each with the tensor on the host."""
    on_host: bool = False
    """Whether it runs on the host, and writes there."""
    fetches: tuple[int, ...] = ()
    """The ops that bring its outputs to the device, for those that are read there."""


@dataclass(frozen=True)
class Relocation:
    """A graph in which some ops read from the host, and where each op and tensor of it comes from."""

    before: Graph
    graph: Graph
    ops: tuple[int | None, ...]
    """For each op the one of the graph before; ``None`` where it was added."""
    tensors: tuple[int | None, ...]
    """For each tensor the one of the graph before; ``None`` where it was added."""
    reads: tuple[HostRead, ...]

    @property
    def fetched_bytes(self) -> int:
        """Bytes that are copied to the device because an op has made them on the host."""
        made = (self.graph.ops[op].outputs[0] for read in self.reads for op in read.fetches)
        return sum(self.graph.tensors[tensor].nbytes or 0 for tensor in made)

    @property
    def sent(self) -> tuple[Sent, ...]:
        """The copies to the host."""
        tensors = self.graph.tensors
        return tuple(
            Sent(op.id, op.inputs[0], tensors[op.inputs[0]].nbytes or 0)
            for op in self.graph.ops
            if op.type == SEND
        )


@dataclass(frozen=True)
class Decision:
    """A plan, the case that it was made for, and how that graph differs from the one that was read."""

    case: Case
    plan: SwapPlan
    peak_bytes: int
    """What the device's allocator will report for the step."""
    doubt: str = ""
    """Why the plan may not fit by chance although it does (:meth:`lms.planner.room.Room.doubt_of`)."""
    relocation: Relocation | None = None
    recomputation: Recomputation | None = None
    """The graph that comes before all others where ops are repeated."""
    segmentation: "Segmentation | None" = None
    """The graph that the relocation, or else the case, begins with where XLA compiles ops in segments."""

    @property
    def graph(self) -> Graph:
        """The graph that the plan is for."""
        return self.case.graph

    def fits(self, limit_bytes: int | None) -> bool:
        """Tell whether the plan keeps to its budget, and its buffers find room on the device."""
        return self.plan.feasible and (limit_bytes is None or self.peak_bytes <= limit_bytes)


def plan_swaps(
    graph: Graph,
    config: LMSConfig,
    device_type: str,
    limit_bytes: int | None,
    costs: Costs,
    peak_before_bytes: int | None = None,
    *,
    thorough: bool = True,
) -> Decision:
    """Plan a step; ops that only move data read from the host where it does not fit otherwise.

    With policy ``all`` they do so wherever that lowers the peak, and the host has room for what they read.

    Args:
        graph: The step.
        config: Policy and parameters.
        device_type: ``CPU`` or ``GPU``.
        limit_bytes: What the device has for the step's own tensors; ``None`` when that is not known.
        costs: The device and its link.
        peak_before_bytes: What the unedited step needs, where ``graph`` is not that step.
        thorough: As for :func:`lms.planner.fragmentation.plan_in_pieces`.
    """
    case = Case.of(graph, config, costs)
    if peak_before_bytes is not None:
        case = replace(case, peak_before_bytes=peak_before_bytes)
    found = _decide(case, config, limit_bytes, thorough)
    if not _wants_less(found, config, limit_bytes):
        return found
    movers = narrow_movers(found.case)
    if not movers:
        return found
    relocation = read_from_host(graph, movers, config.min_tensor_bytes, direct=device_type != "GPU")
    if not relocation.reads:
        return found
    case = replace(Case.of(relocation.graph, config, costs), peak_before_bytes=found.case.peak_before_bytes)
    other = _decide(case, config, limit_bytes, thorough)
    made = _told(other.plan, relocation)
    more_lacks = costs.host_lacks(made.bytes_out) > costs.host_lacks(found.plan.bytes_out)
    if config.policy != "all" and found.fits(limit_bytes):  # but may fail by chance
        is_better = other.fits(limit_bytes) and not other.doubt
    else:
        is_better = needed(other, limit_bytes) < needed(found, limit_bytes)
    if more_lacks or not is_better:
        return found
    return replace(other, plan=made, relocation=relocation)


def refined(found: Decision, config: LMSConfig, limit_bytes: int | None) -> Decision:
    """Look for faster plans of a step than the one that was planned without being thorough.

    Where nothing fits, and where free memory lies in no pieces, there are none.
    """
    if config.policy == "all" or not found.plan.feasible or found.case.costs.maps_pages:
        return found
    made = plan_in_pieces(found.case, config, limit_bytes)
    told = made if found.relocation is None else _told(made, found.relocation)
    plan = replace(told, recomputed=found.plan.recomputed)
    judged = _judged(found.case, plan, config, limit_bytes)
    return replace(found, plan=plan, peak_bytes=judged.peak_bytes, doubt=judged.doubt)


def _decide(case: Case, config: LMSConfig, limit_bytes: int | None, thorough: bool) -> Decision:
    return _judged(case, plan_in_pieces(case, config, limit_bytes, thorough=thorough), config, limit_bytes)


def _judged(case: Case, made: SwapPlan, config: LMSConfig, limit_bytes: int | None) -> Decision:
    doubt = "" if limit_bytes is None else Room(case, limit_bytes, config.margin).doubt_of(made)
    return Decision(case, made, predicted_peak(case, made, limit_bytes), doubt)


def needed(found: Decision, limit_bytes: int | None) -> tuple[int, int]:
    """Return the bytes of a plan, and what it lacks because free memory lies in pieces.

    What the allocator leaves unused of its chunks does no harm within the limit, and is not worth a copy.
    """
    lacking = 0 if limit_bytes is None else max(0, found.peak_bytes - limit_bytes)
    return found.plan.peak_bytes, lacking


def _wants_less(found: Decision, config: LMSConfig, limit_bytes: int | None) -> bool:
    if config.recompute == "only":
        return False
    if config.policy == "all":
        return True
    if config.policy == "threshold" or (found.plan.is_empty and found.plan.feasible):
        return False
    return bool(found.doubt) or not found.fits(limit_bytes)


def _told(made: SwapPlan, relocation: Relocation) -> SwapPlan:
    names = [relocation.graph.ops[read.op].name for read in relocation.reads]
    example = names[0] if len(names) == 1 else f"{names[0]}, ..."
    note = f"{len(names)} of the ops that only move data read from the host ({example})"
    fetched = relocation.fetched_bytes
    return replace(made, sent=relocation.sent, fetched_bytes=fetched, notes=(*made.notes, note))


def narrow_movers(case: Case) -> frozenset[int]:
    """Find the ops that only move data and need so much memory at once that they may raise the peak.

    That is more than :data:`SHARE` of what any other op needs. Those that need more than the others set the
    floor; those that need less still fragment the free memory, of which the largest op needs one chunk.
    """
    schedule = min(case.schedules, key=lambda schedule: schedule.floor[0])
    sets, ops = schedule.working_sets, case.graph.ops
    needs = {op: max(sets[2 * step], sets[2 * step + 1]) for step, op in enumerate(schedule.chain)}
    others = max((need for op, need in needs.items() if ops[op].type not in MOVERS), default=0)
    movers = (op for op in needs if ops[op].type in MOVERS and not ops[op].conditional)
    return frozenset(op for op in movers if needs[op] > SHARE * others)


def read_from_host(graph: Graph, movers: Collection[int], min_bytes: int, *, direct: bool) -> Relocation:
    """Copy ``graph`` so that those of ``movers`` that can read from the host do.

    Args:
        graph: The step.
        movers: Ops with a type of :data:`MOVERS`.
        min_bytes: Smaller inputs are read where they are.
        direct: Whether the device's kernels can read what lies on the host.
    """
    slots = {op: found for op in movers if (found := _readable(graph, graph.ops[op], min_bytes, direct))}
    build = _Relocator(graph, slots, direct)
    for op in graph.ops:
        build.add(op)
    kept = frozenset(build.now[tensor] for tensor in graph.kept)
    backward = frozenset(build.op_ids[op] for op in graph.backward)
    made = Graph(tuple(build.ops), tuple(build.tensors), kept, backward)
    return Relocation(graph, made, tuple(build.op_sources), tuple(build.tensor_sources), tuple(build.reads))


def _readable(graph: Graph, op: Op, min_bytes: int, direct: bool) -> tuple[int, ...]:
    """Return the slots of the inputs that ``op`` may read from the host."""
    made = [graph.tensors[tensor] for tensor in op.outputs]
    if any(tensor.alias_of is not None for tensor in made):
        return ()
    if not direct and any(tensor.id in graph.kept or tensor.nbytes is None for tensor in made):
        return ()
    if op.type != "Transpose" and any(_moves_nothing(graph, op, tensor.nbytes) for tensor in made):
        return ()
    return tuple(slot for slot, tensor in enumerate(op.inputs) if _may_be_sent(graph, tensor, min_bytes))


def _moves_nothing(graph: Graph, op: Op, nbytes: int | None) -> bool:
    """Tell whether an output of ``nbytes`` may be an input as it is.

    Kernels then pass the input on: on a CPU the step would go on with memory of the store, and a variable
    that it is assigned to would stay there.
    """
    return any(graph.tensors[tensor].nbytes == nbytes for tensor in op.inputs)


def _may_be_sent(graph: Graph, tensor: int, min_bytes: int) -> bool:
    read, owner = graph.tensors[tensor], graph.tensors[graph.roots[tensor]]
    fixed = read.forbidden or owner.forbidden or read.outside or owner.outside
    return not fixed and (read.nbytes or 0) >= max(1, min_bytes)


class _Relocator:
    """Copies a graph op by op; an input that is read from the host is sent as soon as it is made."""

    def __init__(self, graph: Graph, slots: Mapping[int, tuple[int, ...]], direct: bool) -> None:
        self._graph, self._slots, self._direct = graph, slots, direct
        self._wanted = {graph.ops[op].inputs[slot] for op, read in slots.items() for slot in read}
        self.ops: list[Op] = []
        self.tensors: list[Tensor] = []
        self.op_sources: list[int | None] = []
        self.tensor_sources: list[int | None] = []
        self.op_ids: list[int] = []
        """For each op of the old graph its id in the new one."""
        self.now: dict[int, int] = {}
        """For each tensor of the old graph the one that later ops read."""
        self._held: dict[int, int] = {}
        self.reads: list[HostRead] = []

    def add(self, op: Op) -> None:
        """Copy the next op."""
        slots = self._slots.get(op.id, ())
        inputs = [
            self._held[tensor] if slot in slots else self.now[tensor] for slot, tensor in enumerate(op.inputs)
        ]
        moved = bool(slots) and not self._direct
        made = len(self.ops)
        outputs = [
            self._tensor(self._graph.tensors[tensor], made, tensor, on_host=moved) for tensor in op.outputs
        ]
        controls = tuple(self.op_ids[control] for control in op.controls)
        self.op_ids.append(made)
        self.ops.append(op._replace(id=made, inputs=tuple(inputs), outputs=tuple(outputs), controls=controls))
        self.op_sources.append(op.id)
        fetched = [tensor for tensor in op.outputs if moved and self._is_read_on_device(tensor)]
        fetches = tuple(self._fetch(op.name, tensor) for tensor in fetched)
        if slots:
            self.reads.append(HostRead(made, {slot: inputs[slot] for slot in slots}, moved, fetches))
        for tensor, on_host in zip(op.outputs, outputs, strict=True):
            if tensor in self._wanted:
                self._held[tensor] = on_host if moved else self._send(tensor)

    def _tensor(self, old: Tensor, op: int, source: int, *, on_host: bool) -> int:
        number = len(self.tensors)
        alias_of = None if old.alias_of is None else self.now[old.alias_of]
        copy = old._replace(id=number, op=op, alias_of=alias_of)
        if on_host:
            copy = copy._replace(outside=True, forbidden=HELD)
        self.tensors.append(copy)
        self.tensor_sources.append(source)
        self.now[source] = number
        return number

    def _is_read_on_device(self, tensor: int) -> bool:
        return any(use.slot not in self._slots.get(use.op, ()) for use in self._graph.uses[tensor])

    def _fetch(self, name: str, tensor: int) -> int:
        """Add an op that copies an output to the device, and let later ops read that copy."""
        old = self._graph.tensors[tensor]
        name = f"{name}/fetch_{old.index}"
        self.now[tensor] = self._added(FETCH, name, self.now[tensor], False, old.forbidden)
        return len(self.ops) - 1

    def _send(self, tensor: int) -> int:
        old = self._graph.tensors[tensor]
        name = f"{self._graph.ops[old.op].name}/send_{old.index}"
        return self._added(SEND, name, self.now[tensor], True, HELD)

    def _added(self, op_type: str, name: str, read: int, outside: bool, forbidden: str | None) -> int:
        op, number = len(self.ops), len(self.tensors)
        nbytes = self.tensors[read].nbytes
        self.tensors.append(Tensor(number, op, 0, nbytes, None, outside, forbidden))
        self.tensor_sources.append(None)
        self.ops.append(Op(op, name, op_type, (read,), (number,)))
        self.op_sources.append(None)
        return number
