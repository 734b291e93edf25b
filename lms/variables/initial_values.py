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

from lms.ir.op_traits import CONSTANTS, FOLDED_BYTES, MERGES
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
    computed: dict[int, list[str]] = {}
    own: set[str] = set()
    constants = _Constants()
    for op in ops:
        handles = [one.op.name for one in op.inputs if one.dtype == tf.resource]
        value = op.inputs[1] if op.type == ASSIGN else None
        nbytes = 0 if value is None else static_bytes(value.shape, value.dtype)
        if value is None or not nbytes or not constants.hold(value.op):
            own.update(() if op.type in READS else handles)
        elif nbytes <= FOLDED_BYTES or value.op.type in CONSTANTS:
            shared[handles[0]] = nbytes
        else:
            one_of = computed.setdefault(constants.number(value.op), [])
            shared |= dict.fromkeys(one_of[:1], nbytes)  # the last of them may write where it lies
            one_of.insert(0, handles[0])
    return _Effect({name: nbytes for name, nbytes in shared.items() if name not in own}, frozenset(own))


class _Constants:
    """Finds ops that compute constants, and those that compute the same; looks at each op once."""

    def __init__(self) -> None:
        self._known: set[str] = set()
        self._numbers: dict[str, int] = {}
        self._keys: dict[object, int] = {}

    def hold(self, op: Any) -> bool:
        """Tell whether an op reads constants alone, and neither it nor what it reads has an effect."""
        left, seen = [op], set[str]()
        while left:
            one = left.pop()
            if one.name in seen or one.name in self._known:
                continue
            seen.add(one.name)
            if one.type not in CONSTANTS:
                if not one.inputs or not _is_pure(one):
                    return False
                left += [source.op for source in one.inputs]
        self._known |= seen
        return True

    def number(self, op: Any) -> int:
        """Return what is equal for constant ops that TensorFlow runs as one (``optimizer_cse.cc``)."""
        left = [op]
        while left:
            missing = [one.op for one in left[-1].inputs if one.op.name not in self._numbers]
            if missing:
                left += missing
                continue
            one = left.pop()
            read = tuple((self._numbers[source.op.name], source.value_index) for source in one.inputs)
            attrs = tuple(
                sorted((name, value.SerializeToString()) for name, value in one.node_def.attr.items())
            )
            key = one.type, one.node_def.device, attrs, read
            self._numbers[one.name] = self._keys.setdefault(key, len(self._keys))
        return self._numbers[op.name]


def _is_pure(op: Any) -> bool:
    """Tell whether an op has no effect, waits for none, and is in no loop."""
    definition = op_def_registry.get(op.type)
    is_stateful = definition is None or definition.is_stateful
    return not (is_stateful or op.control_inputs or op.type in MERGES)
