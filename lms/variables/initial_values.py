"""Find the variables of a session that share memory with others, or with the constants they were made from.

TensorFlow computes constant initial values once, and a session keeps them as long as it lives. Larger ones
are computed when they are assigned, those of one variable's momenta as one. An op that assigns such a value
shares its memory, so the first update of the variable makes a copy. The bytes in use before the first step
lack these copies: an optimizer's momenta, most often.
"""

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import op_def_registry

from lms.ir.op_traits import CONSTANTS, FOLDED_BYTES
from lms.variables.handles import static_bytes

ASSIGN = "AssignVariableOp"
READS = frozenset(
    {"ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VarIsInitializedOp", "VariableShape"}
)


@dataclass(frozen=True)
class _Effect:
    """What running some ops does to the variables of a session, by the names of their handles."""

    shared: Mapping[str, int] = field(default_factory=dict)
    """Bytes of each variable that gets a value whose memory it shares."""
    own: frozenset[str] = frozenset()
    """Variables that get memory of their own."""


class SharedValues:
    """Follows for each session which variables share memory."""

    def __init__(self) -> None:
        self._shared: weakref.WeakKeyDictionary[Any, dict[str, int]] = weakref.WeakKeyDictionary()
        self._effects: weakref.WeakKeyDictionary[Any, dict[tuple[str, ...], _Effect]]
        self._effects = weakref.WeakKeyDictionary()

    def of(self, session: Any) -> Mapping[str, int]:
        """Return by the name of its handle the bytes of each variable that shares its memory."""
        return self._shared.get(session, {})

    def ran(self, session: Any, names: Sequence[str]) -> None:
        """Note that a session has run the ops of these names, with all that they depend on."""
        known = self._effects.setdefault(session.graph, {})
        key = tuple(names)
        if key not in known:
            known[key] = _effect_of(ops_reached(session.graph, names))
        effect = known[key]
        if effect.shared or not effect.own.isdisjoint(self.of(session)):
            kept = {name: nbytes for name, nbytes in self.of(session).items() if name not in effect.own}
            self._shared[session] = {**kept, **effect.shared}


def ops_reached(graph: Any, names: Iterable[str]) -> Iterator[Any]:
    """Yield the ops of these names, and all that they depend on."""
    left, seen = [*map(graph.get_operation_by_name, names)], set[str]()
    while left:
        op = left.pop()
        if op.name not in seen:
            seen.add(op.name)
            left += [*op.control_inputs, *(one.op for one in op.inputs)]
            yield op


def _effect_of(ops: Iterable[Any]) -> _Effect:
    shared: dict[str, int] = {}
    computed: dict[object, list[str]] = {}
    own: set[str] = set()
    for op in ops:
        handles = [one.op.name for one in op.inputs if one.dtype == tf.resource]
        value = op.inputs[1] if op.type == ASSIGN else None
        nbytes = 0 if value is None else static_bytes(value.shape, value.dtype)
        if value is None or not nbytes or not _is_constant(value.op):
            own.update(() if op.type in READS else handles)
        elif nbytes <= FOLDED_BYTES or value.op.type in CONSTANTS:
            shared[handles[0]] = nbytes
        else:
            one_of = computed.setdefault(_key_of(value.op), [])
            shared |= dict.fromkeys(one_of[:1], nbytes)  # the last of them may write where it lies
            one_of.insert(0, handles[0])
    return _Effect({name: nbytes for name, nbytes in shared.items() if name not in own}, frozenset(own))


def _is_constant(op: Any) -> bool:
    """Tell whether an op reads constants alone, and has no effect."""
    if op.type in CONSTANTS:
        return True
    definition = op_def_registry.get(op.type)
    is_pure = definition is not None and not definition.is_stateful and not op.control_inputs
    return is_pure and bool(op.inputs) and all(_is_constant(one.op) for one in op.inputs)


def _key_of(op: Any) -> object:
    """Return what is equal for constant ops that TensorFlow runs as one (``optimizer_cse.cc``)."""
    definition = op.node_def
    attrs = tuple(sorted((name, value.SerializeToString()) for name, value in definition.attr.items()))
    return op.type, definition.device, attrs, tuple(_key_of(one.op) for one in op.inputs)
