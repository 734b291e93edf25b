"""Results that TensorFlow makes once, when a step is made ready, and then keeps for good.

Grappler works out what depends on nothing but constants, shapes among them, and zeros and ones of a known
shape. Each such result becomes a constant of the optimized graph, which its kernel holds: on the device
before the step begins and after it. With logits for every voxel of an image these are several times the
logits: the loss of a 3D U-Net kept five tensors of their size. Equal ones become one constant: the gradients
of six sums over equal shapes are one tensor of ones.

Sources: ``ConstantFolding::IsFoldable``, ``IsZerosLike``, ``IsOnesLike`` and ``CreateNodeDef`` in
constant_folding.cc, ``DedupComputations`` in arithmetic_optimizer.cc of TensorFlow.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lms.graph import Graph
from lms.liveness import round_up
from lms.op_types import IN_PLACE_TYPES

FILLED = frozenset({"OnesLike", "ZerosLike"})
"""One value all over, whatever is read: only its shape must be known."""

VALUE_SLOTS = {"BroadcastTo": 0, "ExpandDims": 0, "Fill": 1, "Reshape": 0, "Squeeze": 0, "Tile": 0}
"""Ops that say one of their inputs again in another shape, which the others tell."""

SHAPES = frozenset({"Rank", "Shape", "ShapeN", "Size"})
"""What they make is known where the shape is."""

WORTH_BYTES = 4 << 10
"""Equal ones of less are counted each: to find that they are equal takes longer than they take room."""

LARGEST_BYTES = 100 << 10
"""``kMaxConstantSize``: a larger result with more than one value is left to the step."""


@dataclass(frozen=True)
class Constants:
    """A step without the results that are there before it."""

    graph: Graph
    nbytes: int
    """What these and the constants as written take of the device for good."""


def find_constants(graph: Graph, ops: Sequence[Any]) -> Constants:
    """Take what TensorFlow keeps out of a step.

    Args:
        graph: The step.
        ops: The TensorFlow op of each op of it.
    """
    known = _Known()
    for op, values in zip(ops, graph.ops, strict=True):
        known.look_at(op, values.type)
    made: set[int] = set()
    nbytes = 0
    counted: set[Hashable] = set()
    for op, values in zip(ops, graph.ops, strict=True):
        if op not in known.constant:
            continue
        made.update(values.outputs)
        if all(reader in known.constant for tensor in op.outputs for reader in tensor.consumers()):
            continue
        size = sum(round_up(graph.tensors[tensor].nbytes or 0) for tensor in values.outputs)
        what: Hashable = known.what(op) if size >= WORTH_BYTES else op
        nbytes += size if what not in counted else 0
        counted.add(what)
    tensors = tuple(
        replace(tensor, outside=True) if tensor.id in made and not tensor.outside else tensor
        for tensor in graph.tensors
    )
    return Constants(replace(graph, tensors=tensors), nbytes)


class _Known:
    """The ops whose results are known before the step runs."""

    def __init__(self) -> None:
        self.constant: set[Any] = set()
        self._uniform: set[Any] = set()
        """Those with one value all over."""
        self._what: dict[Any, tuple[Hashable, Hashable]] = {}

    def what(self, op: Any) -> Hashable:
        """Two ops of which this is equal have the same results: shapes, and values as they are made."""
        pending = [op]
        while pending:
            one = pending[-1]
            missing = [tensor.op for tensor in self._operands(one) if tensor.op not in self._what]
            if missing:
                pending += missing
                continue
            pending.pop()
            self._what[one] = self._say(one)
        return self._what[op]

    def _operands(self, op: Any) -> Sequence[Any]:
        """What decides an op's result beside its type and the shapes of what it reads."""
        if op.type in FILLED or op.type in SHAPES:
            return ()
        if op in self._uniform and op.type in VALUE_SLOTS:
            return (op.inputs[VALUE_SLOTS[op.type]],)
        return tuple(op.inputs)

    def _say(self, op: Any) -> tuple[Hashable, Hashable]:
        """The kind of an op's results, and their values."""
        kind = tuple((tensor.dtype, tuple(tensor.shape.as_list())) for tensor in op.outputs)
        operands = self._operands(op)
        if op in self._uniform and op.type in VALUE_SLOTS:
            return kind, self._what[operands[0].op][1]
        if op.type in SHAPES:
            return kind, (op.type, tuple(tuple(tensor.shape.as_list()) for tensor in op.inputs))
        attrs = sorted(op.node_def.attr.items()) if op.type not in FILLED else ()
        said = tuple((name, value.SerializeToString()) for name, value in attrs if not name.startswith("_"))
        return kind, (op.type, said, tuple((it.value_index, self._what[it.op]) for it in operands))

    def look_at(self, op: Any, op_type: str) -> None:
        """Look at the next op, after all that it reads."""
        if op_type == "Const":
            self.constant.add(op)
            if op.outputs[0].shape.num_elements() == 1:
                self._uniform.add(op)
        elif op_type in FILLED:
            if op.outputs[0].shape.is_fully_defined():
                self.constant.add(op)
                self._uniform.add(op)
        elif op_type in SHAPES:
            if all(tensor.shape.is_fully_defined() for tensor in op.inputs):
                self.constant.add(op)
        elif (read := op.inputs) and all(tensor.op in self.constant for tensor in read):
            self._fold(op)

    def _fold(self, op: Any) -> None:
        """Look at an op that reads constants alone."""
        sizes = [tensor.shape.num_elements() for tensor in op.outputs]
        if not sizes or None in sizes or op.op_def.is_stateful:
            return
        if self._is_uniform(op):
            self._uniform.add(op)
        elif sum(n * t.dtype.size for n, t in zip(sizes, op.outputs, strict=True)) >= LARGEST_BYTES:
            return
        self.constant.add(op)

    def _is_uniform(self, op: Any) -> bool:
        if op.type in VALUE_SLOTS:
            return op.inputs[VALUE_SLOTS[op.type]].op in self._uniform
        if op.type not in IN_PLACE_TYPES and op.type not in ("Cast", "Identity"):
            return False
        return all(tensor.op in self._uniform for tensor in op.inputs)
