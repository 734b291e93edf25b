"""Repeat ops of the forward pass in the backward pass, so that what they made need not be kept until then.

A tensor is *dropped* where the backward pass reads another copy of it, which the same ops make again from
the same inputs. What these inputs are made of is repeated too where it would be gone by then: a chain, up to
tensors that are on the device in any case, or on the host. Each op is repeated once at most (after Chen et
al., "Training Deep Nets with Sublinear Memory Cost", 2016).

The result is a graph like any other: its memory, its time and its swaps are planned as those of the step
that was read. So a copy may be made from a tensor that was swapped, and the simulators see the copies' memory
and that their inputs live longer.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cached_property

from lms.ir.backward import backward_ops
from lms.ir.graph import Graph, Op, Tensor
from lms.ir.liveness import Buffers
from lms.ir.op_traits import AGAIN, CHEAP, FEWEST_TERMS, REPEATABLE_TYPES, SUM, is_update
from lms.schedule.op_order import early_ops, floating_ops

REFERENCES = (
    *("Variable", "VariableV2", "TemporaryVariable", "RefEnter", "RefIdentity", "RefMerge", "RefSelect"),
    *("RefSwitch", "CountUpTo", "ScatterDiv", "ScatterMax", "ScatterMin", "ScatterMul", "ScatterNdAdd"),
    *("ScatterNdMax", "ScatterNdMin", "ScatterNdSub", "ScatterNdUpdate", "StridedSliceAssign"),
)
"""Ops that, like updates, hand on a variable's own memory: what reads it later may read a later value."""


@dataclass(frozen=True)
class Recomputation:
    """A graph in which some ops are repeated, and where each op and tensor of it comes from."""

    graph: Graph
    ops: tuple[int, ...]
    """For each op the one of the graph before that it is, or that it repeats."""
    tensors: tuple[int, ...]
    """For each tensor the one of the graph before that it is, or has the bytes of."""
    repeated: tuple[int, ...]
    """The ops that repeat others, ascending."""
    dropped: frozenset[int]
    """The tensors of the graph before that the backward pass no longer reads, but copies of them."""

    @cached_property
    def places(self) -> tuple[int, ...]:
        """For each op of the graph before its number now."""
        copies = frozenset(self.repeated)
        return tuple(op for op in range(len(self.ops)) if op not in copies)


class Repeats:
    """Tells what of a graph may be repeated, and what dropping a tensor frees and costs.

    Args:
        buffers: The graph's buffers.
        min_bytes: Smaller tensors are kept.
    """

    def __init__(self, buffers: Buffers, min_bytes: int) -> None:
        self.buffers, self.graph = buffers, buffers.graph
        self._min_bytes = max(1, min_bytes)
        self.late = backward_ops(self.graph)
        """The ops of the backward pass."""
        self._fixed = floating_ops(self.graph).union(op.id for op in self.graph.ops if op.conditional)
        """The ops that are neither repeated nor read a copy."""

    @cached_property
    def redirected(self) -> frozenset[int]:
        """The ops that may read a copy: those of the backward pass that wait for another one of it."""
        fixed = self._fixed | self.graph.views | early_ops(self.graph)
        return frozenset(op for op in self.late - fixed if self.frontier(op) is not None)

    def frontier(self, op: int) -> int | None:
        """Return the latest op of the backward pass that ``op`` waits for; ``None`` where there is none.

        A view is no op to wait for: once all that read it read a copy it may not run at all.
        """
        graph = self.graph
        makers = (graph.tensors[graph.roots[tensor]].op for tensor in graph.ops[op].inputs)
        waits = (control for control in graph.ops[op].controls if control not in graph.views)
        found = (one for one in (*makers, *waits) if one in self.late and one not in self._fixed)
        return max(found, default=None)

    @cached_property
    def saved(self) -> frozenset[int]:
        """The buffers of the forward pass that the backward pass reads."""
        return frozenset(
            root
            for root in self.buffers.owners
            if self.graph.tensors[root].op not in self.late
            and not self.late.isdisjoint(self.buffers.users[root])
        )

    @cached_property
    def candidates(self) -> tuple[int, ...]:
        """The saved buffers that may be dropped, in the order in which they are made."""
        return tuple(
            root
            for root in sorted(self.saved)
            if self.buffers.nbytes[root] >= self._min_bytes
            and not self.buffers.kept[root]
            and self.is_repeatable(self.graph.tensors[root].op)
            and not self._feeds_merged(root)
            and not self.redirected.isdisjoint(self.buffers.users[root])
        )

    def is_repeatable(self, op: int) -> bool:
        """Tell whether an op may run a second time."""
        return self._repeatable[op]

    @cached_property
    def _repeatable(self) -> tuple[bool, ...]:
        return tuple(op.id not in self.late and self._may_repeat(op) for op in self.graph.ops)

    def _may_repeat(self, op: Op) -> bool:
        if op.type not in REPEATABLE_TYPES or op.id in self._fixed:
            return False
        tensors = self.graph.tensors
        for tensor in op.outputs:
            made = tensors[tensor]
            if made.outside or made.nbytes is None or made.forbidden not in (None, CHEAP):
                return False
        makers = {self.graph.ops[tensors[self.graph.roots[tensor]].op].type for tensor in op.inputs}
        # oneDNN would merge the copies where it has not merged the two themselves.
        if any(maker in REFERENCES or is_update(maker) for maker in makers):
            return False
        if not self._terms.isdisjoint(self.graph.roots[tensor] for tensor in op.inputs):
            return False
        return not (op.type == "BiasAdd" and "Conv2D" in makers)

    @cached_property
    def _terms(self) -> frozenset[int]:
        """The buffers that sums read which begin with what is free: who repeats a reader holds them longer.

        Of other sums it is known what they begin with (:mod:`lms.rewriter.sum_order`).
        """
        roots, found = self.graph.roots, set[int]()
        for op in self.graph.ops:
            if op.type == SUM and len(op.inputs) >= FEWEST_TERMS:
                terms = {roots[tensor] for tensor in op.inputs}
                if any(self.graph.ops[self.graph.tensors[root].op].hands_on for root in terms):
                    found |= terms
        return frozenset(found)

    def _feeds_merged(self, root: int) -> bool:
        """Tell whether oneDNN would merge the maker of a buffer with a bias that were its only reader."""
        maker = self.graph.ops[self.graph.tensors[root].op].type
        readers = (self.graph.ops[user].type for user in self.buffers.users[root])
        return maker == "Conv2D" and "BiasAdd" in readers

    @cached_property
    def shows(self) -> tuple[bool, ...]:
        """For each tensor whether all views may be repeated through which it shows its buffer."""
        found: list[bool] = []
        for tensor in self.graph.tensors:
            shown = tensor.alias_of
            found.append(shown is None or (found[shown] and self._may_repeat(self.graph.ops[tensor.op])))
        return tuple(found)

    def chain(
        self,
        roots: Iterable[int],
        dropped: Collection[int],
        retained: Collection[int] = (),
        known: Collection[int] = (),
    ) -> frozenset[int]:
        """Return the ops to repeat for some buffers.

        These are their makers, and the makers of what those read where it is gone by then.

        Args:
            roots: The buffers, all of them dropped.
            dropped: All dropped buffers.
            retained: Those that are kept although the forward pass alone reads them.
            known: Ops that are repeated in any case, and not returned.
        """
        graph = self.graph
        chosen: set[int] = set()
        open_ops = [graph.tensors[root].op for root in roots]
        while open_ops:
            op = open_ops.pop()
            if op in chosen or op in known:
                continue
            chosen.add(op)
            for tensor in graph.ops[op].inputs:
                if self.shows[tensor] and self._is_repeated(graph.roots[tensor], dropped, retained):
                    open_ops.append(graph.tensors[tensor].op)  # a view first, then what it shows
        return frozenset(chosen)

    def _is_repeated(self, root: int, dropped: Collection[int], retained: Collection[int]) -> bool:
        if root in dropped:
            return True
        return (
            root not in self.saved
            and root not in retained
            and self.buffers.nbytes[root] >= self._min_bytes
            and not self.buffers.kept[root]
            and self.is_repeatable(self.graph.tensors[root].op)
            and not self._feeds_merged(root)
        )


def recompute(
    repeats: Repeats,
    dropped: Iterable[int],
    retained: Collection[int] = frozenset(),
    borrowed: Collection[int] = frozenset(),
    ahead: int = 0,
) -> Recomputation:
    """Build the graph in which the backward pass reads copies of ``dropped`` buffers.

    A chain is repeated where the first op of the backward pass needs it, and waits for the same op of the
    backward pass as that one does. What the backward pass reads before it has such an op to wait for remains
    the tensor itself.

    Args:
        repeats: What may be repeated.
        dropped: Some of its candidates.
        retained: Buffers that only the forward pass reads, and that are kept for the copies to be made from.
        borrowed: Dropped buffers that copies of others are made from as long as they have no copy themselves.
        ahead: How many ops of the backward pass that may read copies a chain is repeated ahead of its need:
            it then runs while copies from the host are waited for, and takes its memory for longer.
    """
    build = _Repeater(repeats, frozenset(dropped), retained, borrowed)
    readers = sorted(repeats.redirected)
    needs = dict(zip(readers, readers[ahead:], strict=False))
    for op in repeats.graph.ops:
        build.add(op, needs.get(op.id))
    graph = repeats.graph
    kept = frozenset(build.now[tensor] for tensor in graph.kept)
    backward = frozenset((*(build.op_ids[op] for op in graph.backward), *build.repeated))
    made = Graph(tuple(build.ops), tuple(build.tensors), kept, backward)
    repeated, sources = tuple(build.repeated), tuple(build.op_sources)
    return Recomputation(made, sources, tuple(build.tensor_sources), repeated, frozenset(dropped))


class _Repeater:
    """Copies a graph op by op, and repeats ops where they are needed."""

    def __init__(
        self,
        repeats: Repeats,
        dropped: frozenset[int],
        retained: Collection[int],
        borrowed: Collection[int],
    ) -> None:
        self._repeats, self._graph, self._dropped = repeats, repeats.graph, dropped
        self._borrowed = borrowed
        self._chain = repeats.chain(dropped, dropped, retained)
        self.ops: list[Op] = []
        self.tensors: list[Tensor] = []
        self.op_sources: list[int] = []
        self.tensor_sources: list[int] = []
        self.repeated: list[int] = []
        self.op_ids: list[int] = []
        """For each op of the old graph its number in the new one."""
        self.now: dict[int, int] = {}
        """For each tensor of the old graph the same one in the new one."""
        self._copies: dict[int, int] = {}
        """For each tensor of the old graph that an op has made again the copy."""
        self._repeated_ops: set[int] = set()

    def add(self, op: Op, reader: int | None) -> None:
        """Copy the next op, behind the ops that have to be repeated for it, or for a ``reader`` behind it."""
        wanted: frozenset[int] = frozenset()
        if op.id in self._repeats.redirected:
            wanted = self._wanted(op)
            later = () if reader is None else self._wanted(self._graph.ops[reader])
            self._repeat_for(op, wanted.union(one for one in later if one in self.now))
        inputs = [self._copies[one] if one in wanted else self.now[one] for one in op.inputs]
        self.op_ids.append(len(self.ops))
        controls = tuple(self.op_ids[control] for control in op.controls)
        self._append(op, op.name, inputs, controls, self.now)

    def _wanted(self, reader: Op) -> frozenset[int]:
        """Return the inputs of which an op reads copies."""
        roots, shows = self._graph.roots, self._repeats.shows
        return frozenset(one for one in reader.inputs if roots[one] in self._dropped and shows[one])

    def _repeat_for(self, reader: Op, wanted: Iterable[int]) -> None:
        graph = self._graph
        needed: set[int] = set()
        open_ops = [graph.tensors[tensor].op for tensor in wanted]
        while open_ops:
            op = open_ops.pop()
            if op not in needed and op not in self._repeated_ops:
                needed.add(op)
                open_ops += [
                    graph.tensors[tensor].op for tensor in graph.ops[op].inputs if self._is_repeated(tensor)
                ]
        if needed:
            frontier, first = self._repeats.frontier(reader.id), len(self.ops)
            for number in sorted(needed):
                self._repeat(graph.ops[number], frontier, first)

    def _is_repeated(self, tensor: int) -> bool:
        """Tell whether a copy reads a copy of ``tensor``."""
        graph = self._graph
        if graph.roots[tensor] in self._borrowed:
            return False
        if graph.tensors[tensor].op in self._chain:
            return True
        return self._repeats.shows[tensor] and graph.tensors[graph.roots[tensor]].op in self._chain

    def _repeat(self, op: Op, frontier: int | None, first: int) -> None:
        inputs = [
            self._copies[tensor] if tensor in self._copies else self.now[tensor] for tensor in op.inputs
        ]
        begins = all(self.tensors[tensor].op < first for tensor in inputs)
        controls = (self.op_ids[frontier],) if begins and frontier is not None else ()
        self.repeated.append(len(self.ops))
        self._repeated_ops.add(op.id)
        self._append(op, f"{op.name}/{AGAIN}", inputs, controls, self._copies)

    def _append(
        self, op: Op, name: str, inputs: list[int], controls: tuple[int, ...], made: dict[int, int]
    ) -> None:
        number = len(self.ops)
        outputs = []
        for source in op.outputs:
            old, tensor = self._graph.tensors[source], len(self.tensors)
            alias_of = None
            if old.alias_of is not None:
                alias_of = inputs[op.inputs.index(old.alias_of)]
            self.tensors.append(old._replace(id=tensor, op=number, alias_of=alias_of))
            self.tensor_sources.append(source)
            outputs.append(tensor)
        self.ops.append(
            op._replace(id=number, name=name, inputs=tuple(inputs), outputs=tuple(outputs), controls=controls)
        )
        self.op_sources.append(op.id)
        made.update(zip(op.outputs, outputs, strict=True))
