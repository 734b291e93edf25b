"""Find the variables of a session that share memory with the constants which they were made from.

TensorFlow computes constant initial values once, and a session keeps them as long as it lives. An op that
assigns such a value shares its memory, so the first update of the variable makes a copy. The bytes in use
before the first step lack these copies: an optimizer's momenta, most often.
"""

import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tensorflow.python.framework import op_def_registry

from lms.reader.folded_constants import CONSTANTS, LARGEST_BYTES
from lms.variables.handles import static_bytes

ASSIGN, GROUP = "AssignVariableOp", "NoOp"


@dataclass(frozen=True)
class _Effect:
    """What running some ops does to the variables of a session."""

    shared: Mapping[str, int] = field(default_factory=dict)
    """Bytes of each variable that gets a constant, by the name of its handle."""
    own: frozenset[str] = frozenset()
    """Variables that get another value."""
    is_step: bool = False
    """Whether other ops ran: a step, most likely, which gives what it updates memory of its own."""


class SharedValues:
    """Follows for each session which variables share memory with a constant."""

    def __init__(self) -> None:
        self._shared: weakref.WeakKeyDictionary[Any, dict[str, int]] = weakref.WeakKeyDictionary()
        self._effects: weakref.WeakKeyDictionary[Any, dict[tuple[str, ...], _Effect]]
        self._effects = weakref.WeakKeyDictionary()

    def of(self, session: Any) -> Mapping[str, int]:
        """Return by the name of its handle the bytes of each variable that shares its memory."""
        return self._shared.get(session, {})

    def ran(self, session: Any, targets: Sequence[str]) -> None:
        """Note that a session has run the ops of these names, beside what it fetched."""
        if not targets:
            return
        known = self._effects.setdefault(session.graph, {})
        key = tuple(targets)
        if key not in known:
            known[key] = _effect_of(map(session.graph.get_operation_by_name, targets))
        effect = known[key]
        kept = {} if effect.is_step else self.of(session)
        shared = {name: nbytes for name, nbytes in kept.items() if name not in effect.own} | dict(
            effect.shared
        )
        if shared or session in self._shared:
            self._shared[session] = shared


def _effect_of(ops: Iterable[Any]) -> _Effect:
    left, seen = [*ops], set[str]()
    shared: dict[str, int] = {}
    own: set[str] = set()
    is_step = False
    while left:
        op = left.pop()
        if op.name in seen:
            continue
        seen.add(op.name)
        if op.type == GROUP:
            left += op.control_inputs
        elif op.type == ASSIGN:
            handle, value = op.inputs[0].op.name, op.inputs[1]
            nbytes = static_bytes(value.shape, value.dtype)
            if 0 < nbytes <= LARGEST_BYTES and _is_constant(value.op):
                shared[handle] = nbytes
            else:
                own.add(handle)
        else:
            is_step = True
    return _Effect(shared, frozenset(own), is_step)


def _is_constant(op: Any) -> bool:
    """Tell whether TensorFlow computes an op's results once: it reads constants alone, and has no effect."""
    if op.type in CONSTANTS:
        return True
    definition = op_def_registry.get(op.type)
    is_pure = definition is not None and not definition.is_stateful and not op.control_inputs
    return is_pure and bool(op.inputs) and all(_is_constant(one.op) for one in op.inputs)
