"""A step's graph as the engine sees it: plain values, no TensorFlow.

Ops and tensors are known by dense integer ids. An op's id is its place in the original schedule, so every
input and control input of an op has a smaller op id: the graph is acyclic by construction. Build one with
:class:`GraphBuilder`.

Sizes are the exact bytes of the data; rounding to the allocator's granule happens in :mod:`lms.ir.liveness`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from lms.ir.op_traits import (
    ALIAS_TYPES,
    KEPT_FOR_GRADIENT,
    OF_BODIES,
    OUTSIDE_TYPES,
    UNSWAPPABLE_TYPES,
    in_place_slots,
    is_collective,
)


class GraphError(ValueError):
    """A graph contradicts itself; the text says where."""


class Use(NamedTuple):
    """One reading of a tensor: input number ``slot`` of op ``op``."""

    op: int
    slot: int


class Tensor(NamedTuple):
    """One output of an op."""

    id: int
    op: int
    """The producer."""
    index: int  # type: ignore[assignment]
    """Output number of the producer."""
    nbytes: int | None
    """Exact size of the data; ``None`` when it is unknown (never swapped, counted as 0, and reported)."""
    alias_of: int | None = None
    """The tensor whose buffer this one shares (``Identity``, ``Reshape``, ...), always with a smaller id."""
    outside: bool = False
    """Not part of the step's own device memory: a variable, a constant, an argument, or in the memory of
    another device (also small integer outputs that a GPU kernel keeps on the host)."""
    forbidden: str | None = None
    """Why this tensor must not be swapped; ``None`` when it may be."""


class Op(NamedTuple):
    """One node. Control flow (``If``, ``While``, a call) is one op, with its body's peak as workspace."""

    id: int
    name: str
    type: str
    inputs: tuple[int, ...]
    """Tensor ids in slot order; an id may repeat."""
    outputs: tuple[int, ...]
    """Tensor ids."""
    controls: tuple[int, ...] = ()
    """Op ids that must have run before."""
    in_place: tuple[int, ...] = ()
    """Slots whose buffer output 0 may take over when this is the buffer's last use and the sizes agree."""
    workspace_bytes: int = 0
    """Scratch memory of the kernel, alive only while it runs."""
    flops: float | None = None
    """Arithmetic of the op when known; otherwise the cost model guesses from bytes."""
    chainable: bool = True
    """May get control edges that fix its place in the order (collectives may not)."""
    conditional: bool = False
    """Whether a condition may leave it out. What waits for an op that is left out is left out, too, so the
    writer has others wait for a node that runs in any case (:mod:`lms.rewriter.branches`)."""
    parts: tuple[str, ...] = ()
    """The types of the ops that TensorFlow has merged into this one."""
    assigns_in_place: bool = False
    """Whether an assignment may copy the value into the memory that its variable has."""
    elsewhere: bool = False
    """Whether another device runs it: the host or, of several GPUs, one that another plan is for."""
    holds_operands: bool = False
    """Whether its operands and results lie side by side until it is done, which is when a result is used."""
    unordered: bool = False
    """Whether it may get no control edge, as what turns a loop or parts the branches of a condition."""

    @property
    def hands_on(self) -> bool:
        """Tell whether others that no plan knows of may hold what it makes."""
        return self.elsewhere or self.type in OF_BODIES


@dataclass(frozen=True)
class Graph:
    """A step: ops in schedule order, its tensors, and the tensors that outlive it."""

    ops: tuple[Op, ...]
    tensors: tuple[Tensor, ...]
    kept: frozenset[int] = frozenset()
    """Tensor ids that are alive at the end (outputs of the function): never freed, never swapped."""
    backward: frozenset[int] = frozenset()
    """Op ids that belong to the backward pass although neither name nor type says so."""

    def with_moving_variables(self) -> "Graph":
        """Return the same step, none of whose assignments writes into its variable's memory."""
        ops = tuple(op._replace(assigns_in_place=False) if op.assigns_in_place else op for op in self.ops)
        return replace(self, ops=ops)

    @cached_property
    def uses(self) -> tuple[tuple[Use, ...], ...]:
        """Each tensor's uses, in schedule order."""
        uses: list[list[Use]] = [[] for _ in self.tensors]
        for op in self.ops:
            for slot, tensor in enumerate(op.inputs):
                uses[tensor].append(Use(op.id, slot))
        return tuple(map(tuple, uses))

    @cached_property
    def roots(self) -> tuple[int, ...]:
        """For each tensor, the tensor that owns its buffer (itself, unless it is an alias)."""
        roots: list[int] = []
        for tensor in self.tensors:
            roots.append(tensor.id if tensor.alias_of is None else roots[tensor.alias_of])
        return tuple(roots)

    @cached_property
    def views(self) -> frozenset[int]:
        """The ops whose outputs are all aliases: they take no memory, whenever they run."""
        return frozenset(
            op.id
            for op in self.ops
            if op.outputs and all(self.tensors[tensor].alias_of is not None for tensor in op.outputs)
        )

    @cached_property
    def predecessors(self) -> tuple[tuple[int, ...], ...]:
        """For each op, the ops it waits for, by data or control, ascending and without repeats."""
        producer = [tensor.op for tensor in self.tensors]
        return tuple(
            tuple(sorted({producer[tensor] for tensor in op.inputs}.union(op.controls))) for op in self.ops
        )

    @cached_property
    def successors(self) -> tuple[tuple[int, ...], ...]:
        """For each op, the ops that wait for it, ascending and without repeats."""
        successors: list[list[int]] = [[] for _ in self.ops]
        for op, before in enumerate(self.predecessors):
            for earlier in before:
                successors[earlier].append(op)
        return tuple(map(tuple, successors))

    def tensor_name(self, tensor: int) -> str:
        """Return ``producer:index``, as TensorFlow writes it.

        An output that only oneDNN's kernel has is described in words instead.
        """
        value = self.tensors[tensor]
        producer = self.ops[value.op]
        if value.index and (kept := KEPT_FOR_GRADIENT.get(producer.type)):
            return f"{producer.name} ({kept}, kept for the gradient)"
        return f"{producer.name}:{value.index}"


class GraphBuilder:
    """Collects ops in schedule order and builds a checked :class:`Graph`.

    Example:
        >>> build = GraphBuilder()
        >>> (x,) = build.add("x", "Placeholder", outputs=[1024])
        >>> (y,) = build.add("y", "Relu", inputs=[x], outputs=[1024])
        >>> graph = build.build(kept=[y])
    """

    def __init__(self) -> None:
        self._ops: list[Op] = []
        self._tensors: list[Tensor] = []

    def add(
        self,
        name: str,
        op_type: str,
        *,
        inputs: Sequence[int] = (),
        outputs: Sequence[int | None] = (),
        controls: Iterable[int] = (),
        aliases: Sequence[int | None] | None = None,
        in_place: Sequence[int] | None = None,
        outside: bool | Sequence[bool] | None = None,
        forbidden: str | Sequence[str | None] | None = None,
        workspace_bytes: int = 0,
        flops: float | None = None,
        chainable: bool | None = None,
        conditional: bool = False,
        parts: Sequence[str] = (),
        assigns_in_place: bool = False,
        elsewhere: bool = False,
        holds_operands: bool = False,
        unordered: bool = False,
    ) -> tuple[int, ...]:
        """Append one op; its id is the number of ops before the call.

        Args:
            name: Name of the op, unique in the graph.
            op_type: Its type; :mod:`lms.ir.op_traits` fills in what is not given.
            inputs: Tensor ids in slot order.
            outputs: Bytes of each output, ``None`` where unknown.
            controls: Op ids of control inputs.
            aliases: For each output the input slot whose buffer it shares, or ``None``. Default: by type.
            in_place: Slots whose buffer output 0 may take over. Default: by type.
            outside: Whether the outputs live outside the step's device memory. Default: by type.
            forbidden: Why the outputs must not be swapped (one text for all, or one each). Default: by type.
            workspace_bytes: Scratch memory while the op runs.
            flops: Arithmetic, when known.
            chainable: Whether the op may get ordering edges. Default: not for collectives.
            conditional: Whether a condition may leave the op out.
            parts: The types of the ops that were merged into this one.
            assigns_in_place: Whether an assignment may copy the value into the memory that its variable has.
            elsewhere: Whether another device runs the op.
            holds_operands: Whether operands stay until the results are used.
            unordered: Whether the op may get no control edge.

        Returns:
            The ids of the outputs.

        Raises:
            GraphError: If an input or control input is not there yet, or an alias names a slot that is not
                there.
        """
        op = len(self._ops)
        inputs, controls = tuple(inputs), tuple(sorted(set(controls)))
        self._check(name, op, inputs, controls)
        count = len(outputs)
        slots = _alias_slots(op_type, len(inputs), count) if aliases is None else tuple(aliases)
        owners = [self._owner(name, inputs, index, slot) for index, slot in enumerate(slots[:count])]
        if in_place is None:
            in_place = in_place_slots(op_type, len(inputs)) if count else ()
        if outside is None:
            outside = op_type in OUTSIDE_TYPES
        if forbidden is None:
            forbidden = UNSWAPPABLE_TYPES.get(op_type)
        outsides = [outside] * count if isinstance(outside, bool) else outside
        reasons = [forbidden] * count if forbidden is None or isinstance(forbidden, str) else forbidden
        made = self._add_outputs(op, outputs, owners + [None] * (count - len(owners)), outsides, reasons)
        self._ops.append(
            Op(
                op,
                name,
                op_type,
                inputs,
                made,
                controls,
                tuple(in_place),
                workspace_bytes,
                flops,
                not is_collective(op_type) if chainable is None else chainable,
                conditional,
                tuple(parts),
                assigns_in_place,
                elsewhere,
                holds_operands,
                unordered,
            )
        )
        return made

    def _owner(self, name: str, inputs: Sequence[int], index: int, slot: int | None) -> int | None:
        """Return the tensor whose buffer output ``index`` shares: the input in ``slot``, if any."""
        if slot is None:
            return None
        if not 0 <= slot < len(inputs):
            raise GraphError(f"op {name!r}: output {index} shares input {slot}; it has {len(inputs)} inputs")
        return inputs[slot]

    def _add_outputs(
        self,
        op: int,
        sizes: Sequence[int | None],
        owners: Sequence[int | None],
        outsides: Sequence[bool],
        reasons: Sequence[str | None],
    ) -> tuple[int, ...]:
        first = len(self._tensors)
        for index, size in enumerate(sizes):
            self._tensors.append(
                Tensor(first + index, op, index, size, owners[index], outsides[index], reasons[index])
            )
        return tuple(range(first, len(self._tensors)))

    def build(self, kept: Iterable[int] = ()) -> Graph:
        """Build the graph; ``kept`` are the tensors that are alive at the end of the step.

        Raises:
            GraphError: If a kept tensor does not exist.
        """
        kept = frozenset(kept)
        if any(not 0 <= tensor < len(self._tensors) for tensor in kept):
            raise GraphError(f"kept tensors {sorted(kept)}; the graph has {len(self._tensors)} tensors")
        return Graph(tuple(self._ops), tuple(self._tensors), kept)

    def _check(self, name: str, op: int, inputs: Sequence[int], controls: Sequence[int]) -> None:
        if inputs and not 0 <= min(inputs) <= max(inputs) < len(self._tensors):
            raise GraphError(
                f"op {name!r} reads a tensor that no earlier op makes; add ops in schedule order"
            )
        if controls and not 0 <= min(controls) <= max(controls) < op:
            raise GraphError(f"op {name!r} waits for an op that is not earlier; add ops in schedule order")


def _alias_slots(op_type: str, inputs: int, outputs: int) -> tuple[int | None, ...]:
    if op_type not in ALIAS_TYPES:
        return ()
    if op_type == "IdentityN":
        return tuple(range(min(inputs, outputs)))
    return (0,) if inputs else ()
