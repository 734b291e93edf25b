"""Keep the values of a session's variables before a step, and put them back.

Both go through ops that the graph has: each variable was made with an op that reads it and with one that
gives it its first value, in whose place any value can be fed. So it works in a graph that is final, too.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

HANDLES = frozenset({"VarHandleOp"})
REFERENCES = frozenset({"Variable", "VariableV2"})
READ, ASSIGNS = "ReadVariableOp", frozenset({"Assign", "AssignVariableOp"})

TOGETHER_BYTES = 16 << 20
"""The most bytes of the values that are put back at once, but for a single one. A session optimizes its graph
for each time."""


@dataclass
class SessionValues:
    """The values that some variables of a session had."""

    session: Any
    values: list[tuple[Any, Any, np.ndarray[Any, Any]]] = field(default_factory=list)
    """For each variable the op that assigns to it, the tensor that this assigns, and the value."""
    lost: str = ""
    """Why there are no values; empty where there are."""

    @classmethod
    def of(cls, session: Any, ops: Iterable[Any]) -> "SessionValues":
        """Read the variables among some ops of the session's graph."""
        variables = [op for op in ops if op.type in HANDLES | REFERENCES]
        readers, assigners = [*map(_reader_of, variables)], [*map(_assigner_of, variables)]
        for op, reader, assigner in zip(variables, readers, assigners, strict=True):
            if reader is None or assigner is None:
                return cls(session, lost=f"no op of the graph reads {op.name} alone, or gives it a value")
        try:
            values = session.run(readers)
        except tf.errors.OpError as error:
            return cls(
                session, lost=f"its variables could not be read before it ({error.message.splitlines()[0]})"
            )
        for op, assigner, value in zip(variables, assigners, values, strict=True):
            given = assigner.inputs[1]
            if not (session.graph.is_feedable(given) and given.shape.is_compatible_with(value.shape)):
                return cls(session, lost=f"{op.name} cannot be given the value back that it had")
        return cls(session, [*zip(assigners, (one.inputs[1] for one in assigners), values, strict=True)])

    def put_back(self) -> None:
        """Give the variables these values: few at once, for the device holds those that are fed, too.

        Raises:
            tf.errors.OpError: If the device has no room for that.
        """
        fed: dict[Any, Any] = {}
        assigned: list[Any] = []
        for assign, given, value in self.values:
            size = sum(one.nbytes for one in fed.values())
            if assigned and (given.ref() in fed or size + value.nbytes > TOGETHER_BYTES):
                self._assign(assigned, fed)
                fed, assigned = {}, []
            fed[given.ref()] = value
            assigned.append(assign)
        self._assign(assigned, fed)

    def _assign(self, assigned: list[Any], fed: dict[Any, Any]) -> None:
        self.session.run(assigned, {given.deref(): value for given, value in fed.items()})


def _reader_of(op: Any) -> Any:
    """Return a tensor with the value of a variable that waits for nothing else; ``None`` without one."""
    if op.type in REFERENCES:
        return op.outputs[0]
    readers = (one for one in op.outputs[0].consumers() if one.type == READ and not one.control_inputs)
    return next((one.outputs[0] for one in readers), None)


def _assigner_of(op: Any) -> Any:
    """Return an op that gives a variable a value, and waits for nothing else; ``None`` without one."""
    users = (one for one in op.outputs[0].consumers() if one.type in ASSIGNS and not one.control_inputs)
    return next((one for one in users if one.inputs[0].op is op), None)
