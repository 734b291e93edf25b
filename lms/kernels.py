"""Ops that TensorFlow makes one kernel of, as the edit of a graph leaves them.

Grappler merges a convolution with its bias and activation, sums with sums, and chains of elementwise ops, and
what it makes of them differs from what they are in the last digits. It merges nothing that has a control
edge. So the edges of a plan go round such a group: they lead to gates in front of it and start from a probe
behind it, ops that only pass a tensor on.

Sources: ``remapper.cc`` (``HasControlFaninOrFanout``), ``pattern_utils.cc`` (``DoesOpTypePatternMatch``),
``arithmetic_optimizer.cc`` (``AddOpsRewriteStage``, ``UnaryOpsComposition``, ``MinimizeBroadcasts``) and
``constant_folding.cc`` (``ReciprocalConst`` of divisions) of TensorFlow.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import tensorflow as tf

from lms.op_types import IN_PLACE_TYPES, SHAPE_READERS
from lms.transports.copy_op import add_copy

CONTRACTIONS = frozenset({"Conv2D", "Conv3D", "DepthwiseConv2dNative", "MatMul"})
BIASES, SUMS = frozenset({"BiasAdd"}), frozenset({"Add", "AddN", "AddV2"})
ACTIVATIONS = frozenset({"Elu", "LeakyRelu", "Relu", "Relu6", "Sigmoid", "Tanh"})
UNARY = frozenset(
    """Abs Acos Acosh Asin Asinh Atan Atanh Ceil Cos Cosh Elu Exp Expm1 Floor Inv Log Log1p Neg Reciprocal
    Relu Relu6 Rint Round Rsqrt Selu Sigmoid Sin Sinh Sqrt Square Tan Tanh""".split()
)
NORMALISATIONS = frozenset({"FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3"})
"""On a CPU with oneDNN merged with the ``Relu`` that alone reads the first output; what reads the others
comes after both then."""
DIVISIONS = frozenset({"Div", "RealDiv"})
"""By a constant they are products with its reciprocal before anything is merged."""
MERGED = CONTRACTIONS | BIASES | SUMS | ACTIVATIONS | UNARY | NORMALISATIONS | DIVISIONS | {"Mul"}
BETWEEN = "TensorFlow merges the op that reads it with the one that makes it"
"""Why a tensor stays that need not even come into being."""


@dataclass(frozen=True)
class Group:
    """Ops that may become one: a tree of which the first output of each but the last is read in it alone."""

    members: tuple[Any, ...]
    """In the order in which they run."""

    @property
    def last(self) -> Any:
        """What the others lead to."""
        return self.members[-1]

    @cached_property
    def inside(self) -> frozenset[Any]:
        """The same ops, to look one up."""
        return frozenset(self.members)


def find_groups(ops: Sequence[Any]) -> list[Group]:
    """The groups of a graph that is not edited yet, in its order; ``ops`` all that run, as they run."""
    last_of: dict[Any, Any] = {}
    only = _only_readers(ops)
    uneven = _uneven_products(ops, only)
    for op in reversed(ops):
        reader = only.get(op)
        if reader is not None and ((op in uneven and reader in uneven) or _merge(op, reader, only)):
            last_of[op] = last_of.get(reader, reader)
    members: dict[Any, list[Any]] = {}
    for op in ops:
        last = last_of.get(op, op)
        if last is not op or op in members:
            members.setdefault(last, []).append(op)
    return [Group(tuple(found)) for found in members.values() if len(found) > 1]


def _merge(op: Any, reader: Any, only: Mapping[Any, Any]) -> bool:
    """Whether TensorFlow may make one op of these."""
    kind, after = op.type, reader.type
    if kind in CONTRACTIONS:
        fits = after in BIASES or (after in SUMS and reader.inputs[-1].shape.rank == 1)
    elif kind in BIASES:
        fits = after in SUMS or after in ACTIVATIONS
    elif kind in SUMS:
        fits = after in SUMS or after in ACTIVATIONS
    elif kind == "Mul":
        fits = after == "Sigmoid" and any(map(_is_constant, op.inputs))
    elif kind in NORMALISATIONS:
        fits = after == "Relu" and op.get_attr("T") in (tf.float32, tf.bfloat16)
    elif kind == "Sigmoid" and after == "Mul":
        fits = any(tensor is _argument(op, only) for tensor in reader.inputs)
    else:
        fits = kind in UNARY and after in UNARY
    return fits and _is_free(op) and _is_free(reader)


def _uneven_products(ops: Sequence[Any], only: Mapping[Any, Any]) -> set[Any]:
    """The products of factors of which one is smaller than the others, or a constant; with those between.

    Grappler takes all factors of such a tree together: it multiplies the small ones first, moves constants to
    each other, and pairs what remains.
    """
    last_of: dict[Any, Any] = {}
    for op in reversed(ops):
        if _is_product(op) and _is_free(op):
            last_of[op] = last_of.get(only.get(op), op)
    uneven = {last for op, last in last_of.items() if any(_is_small(one, op) for one in op.inputs)}
    return {op for op, last in last_of.items() if last in uneven}


def _is_product(op: Any) -> bool:
    return op.type == "Mul" or (
        op.type in DIVISIONS and _is_constant(op.inputs[1]) and op.inputs[1].dtype.is_floating
    )


def reserved_bytes(normalisation: Any, elements: int) -> int:
    """What a normalisation of so many elements that is merged with its activation leaves to its gradient.

    Which of them the activation let pass, in a bit each, or a byte where the channels are no multiple of
    eight. TensorFlow takes a number of four bytes for each byte of that. Seen with 22 numbers of channels
    from 1 to 256 in two sizes on TensorFlow 2.21, three of them on 2.15.
    """
    if not normalisation.get_attr("is_training"):
        return 0
    channels = normalisation.inputs[0].shape[-1]
    return 4 * (elements if channels is None or channels % 8 else elements // 8)


def _argument(sigmoid: Any, only: Mapping[Any, Any]) -> Any:
    """What a sigmoid reads, without a constant factor that is merged into it."""
    read = sigmoid.inputs[0]
    if read.op.type != "Mul" or only.get(read.op) is not sigmoid or not _merge(read.op, sigmoid, only):
        return read
    factors = [tensor for tensor in read.op.inputs if not _is_constant(tensor)]
    return factors[0] if len(factors) == 1 else read


def _only_readers(ops: Sequence[Any]) -> dict[Any, Any]:
    """For each op that may be merged the one op that reads what it makes, where there are no others.

    Ops that do not run count as little as those that read a shape: TensorFlow has dropped them by then.
    """
    running = set(ops)
    only = {}
    for op in ops:
        if op.type in MERGED:
            consumers = op.outputs[0].consumers()
            readers = [one for one in consumers if one.type not in SHAPE_READERS and one in running]
            if len(readers) == 1:
                only[op] = readers[0]
    return only


def _is_constant(tensor: Any) -> bool:
    """Whether a tensor is a constant, or another type or shape of one."""
    while tensor.op.type in ("Cast", "Identity", "Reshape"):
        tensor = tensor.op.inputs[0]
    return bool(tensor.op.type == "Const")


def _is_small(factor: Any, product: Any) -> bool:
    return _is_constant(factor) or not factor.shape.is_compatible_with(product.outputs[0].shape)


def _is_free(op: Any) -> bool:
    return not op.control_inputs and not op._control_outputs


@dataclass(frozen=True)
class Detours:
    """Takes the control edges of an edit off the groups of a graph.

    A group runs where its last op stands in the plan's order: whatever waits for another of its ops and
    stands before that waits for what that op waits for instead. Nothing else leads from these ops anywhere
    but to the last, so no edge can close a cycle; where the shape of one of them does, or another of its
    outputs, the group stays as it is.

    Args:
        place: For each op of the graph before the edit its place in the order.
        tied: The ops that the edit put edges on, and the groups of such ops.
        mark: Called with each op that is added, and with what it is for.
    """

    place: Mapping[Any, int]
    tied: Collection[Any]
    mark: Callable[[Any, str], None]

    def round(self, group: Group) -> None:
        """Take the edges off one group."""
        if self._leads_on_early(group):
            return
        waits = self._waits(group)
        with (
            group.last.graph.as_default(),
            tf.control_dependencies(None),
            tf.device(group.last.device or None),
        ):
            late: dict[Any, None] = {}
            for op in group.members:
                early = []
                for after in op._control_outputs:
                    if after in group.inside:
                        continue
                    if self._is_later(after, self.place[group.last]):
                        late[after] = None
                    else:
                        early.append(after)
                if early:
                    _wait_instead(early, group, self._passed(_read(op, group), waits[op], "before"))
            if late:
                self._probe(late, group)
            _read_the_same(group)
            for op in group.members:
                if op.control_inputs:
                    op._remove_all_control_inputs()
            for tensor, before in self._gates(group, waits):
                self._close(tensor, before, group)

    def _waits(self, group: Group) -> dict[Any, list[Any]]:
        """For each op those outside of its group that it waits for, itself or through another of them."""
        waits: dict[Any, list[Any]] = {}
        for op in sorted(group.members, key=self.place.__getitem__):
            found: dict[Any, None] = {}
            for before in op.control_inputs:
                found.update(dict.fromkeys(waits.get(before, [before])))
            waits[op] = list(found)
        return waits

    def _leads_on_early(self, group: Group) -> bool:
        """Whether one of the ops leads, not through the last, to what has an edge or to the group again.

        What leads nowhere before the last op can run behind it too.
        """
        end = self.place[group.last]
        read = (tensor for op in group.members[:-1] for tensor in op.outputs)
        waiting = [reader for tensor in read for reader in tensor.consumers() if reader not in group.inside]
        seen = set()
        while waiting:
            op = waiting.pop()
            if op in seen or self.place.get(op, -1) > end:
                continue
            if op in group.inside or op in self.tied:
                return True
            seen.add(op)
            waiting.extend(_after(op))
        return False

    def _is_later(self, op: Any, place: int) -> bool:
        """Whether an op, or all that follows it where it was added, comes behind a place in the order."""
        if op in self.place:
            return self.place[op] > place
        return all(self._is_later(after, place) for after in _after(op))

    def _probe(self, late: Iterable[Any], group: Group) -> None:
        """Let ops wait for what passes the result on; what may take the result's buffer over reads it there.

        Such an op takes over a buffer that nobody else holds, so the probe may not still hold it then.
        """
        made = group.last.outputs[0]
        takers = [op for op in made.consumers() if op.type in IN_PLACE_TYPES]
        probe = self._passed(made, (), "probe")
        _wait_instead(late, group, probe)
        for op in takers:
            for slot, tensor in enumerate(op.inputs):
                if tensor is made:
                    op._update_input(slot, probe.outputs[0])

    def _gates(self, group: Group, waits: Mapping[Any, Sequence[Any]]) -> list[tuple[Any, list[Any]]]:
        """For each tensor that needs a gate what opens it."""
        gates: dict[int, tuple[Any, list[Any]]] = {}
        for op in group.members:
            if not waits[op] and op.type != "Sigmoid":
                continue
            tensor = _read(op, group)
            if waits[op] or _has_edges(tensor.op):
                gates.setdefault(id(tensor), (tensor, []))[1].extend(waits[op])
        return list(gates.values())

    def _close(self, tensor: Any, before: Sequence[Any], group: Group) -> None:
        gate = self._passed(tensor, before, "gate")
        if any(op.type == "Sigmoid" for op in group.members):  # there what is read may have no edges either
            gate = self._passed(gate.outputs[0], (), "passed")
        for op in group.members:
            for slot, read in enumerate(op.inputs):
                if read is tensor:
                    op._update_input(slot, gate.outputs[0])

    def _passed(self, tensor: Any, before: Sequence[Any], purpose: str) -> Any:
        """An op that passes a tensor on once others have run.

        It is named after what it shows: Grappler sorts the inputs of sums by name.
        """
        name = tensor.op.name.split("/lms/")[0]
        with tf.control_dependencies(before):
            passed = add_copy("Identity", tensor, "", f"{name}/lms/{purpose}").op
        self.mark(passed, "gate")
        return passed


def _read_the_same(group: Group) -> None:
    """Let a sigmoid read what its product reads: a copy that came back between the two."""
    for op in group.members:
        for reader in op.outputs[0].consumers():
            if op.type == "Sigmoid" and reader.type == "Mul" and reader in group.inside:
                (other,) = (tensor for tensor in reader.inputs if tensor.op is not op)
                first = op.inputs[0].op if op.inputs[0].op in group.inside else op
                for slot, tensor in enumerate(first.inputs):
                    if not _is_constant(tensor):
                        first._update_input(slot, other)


def _read(op: Any, group: Group) -> Any:
    """A tensor from outside of the group that ``op`` reads, else one that a member reads before it."""
    while True:
        for tensor in op.inputs:
            if tensor.op not in group.inside and not _is_constant(tensor):
                return tensor
        inner = [tensor.op for tensor in op.inputs if tensor.op in group.inside]
        if not inner:
            return op.inputs[0]
        op = inner[0]


def with_their_groups(ops: Collection[Any], groups: Iterable[Group]) -> set[Any]:
    """Some ops, and all of each group that has one of them."""
    return {*ops, *(op for group in groups if not group.inside.isdisjoint(ops) for op in group.members)}


def _has_edges(op: Any) -> bool:
    return bool(op.control_inputs or op._control_outputs)


def _wait_instead(ops: Iterable[Any], group: Group, other: Any) -> None:
    """Let ops wait for another one in place of those of the group."""
    for op in ops:
        kept = [before for before in op.control_inputs if before not in group.inside]
        op._remove_all_control_inputs()
        op._add_control_inputs([*kept, other])


def _after(op: Any) -> Iterator[Any]:
    for tensor in op.outputs:
        yield from tensor.consumers()
    yield from op._control_outputs
