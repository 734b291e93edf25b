"""Ops of a step that oneDNN merges on the CPU without a look for paths between them: one op to the engine."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

TWIN_SLOTS = {"Conv2DBackpropFilter": 2}
"""On the CPU, oneDNN's graph pass merges such an op with a ``BiasAddGrad`` that reads the same gradient (in
this slot), without looking for paths between the two: with one it makes a cycle, and where the two wait for
different ops it leaves them apart and the bias gradient differs in the last digits. So both are one op to
the engine. Between the two may stand the barrier that ``tf.gradients`` makes of the gradients of a
``BiasAdd``, an ``Identity`` that waits for all of them: Grappler takes it away, and oneDNN merges."""

KNOWN = frozenset({"Const", "Fill", "ZerosLike"})
"""What makes a gradient that Grappler knows, as behind a kink: it works the bias's gradient out, and nothing
is left to merge. Such gradients are equal in all updates of a step, and one would lead to the next."""

BEHIND_BARRIER = "gradient behind a barrier"
"""Why a gradient stays that one of two twins reads through a barrier which waits for the other."""


def find_twins(types: Mapping[Any, str]) -> dict[Any, Any]:
    """For each op that oneDNN merges into another that other op; ``types`` are those of all ops that run."""
    twins: dict[Any, Any] = {}
    for op, op_type in types.items():
        slot = TWIN_SLOTS.get(op_type)
        gradient = None if slot is None else _passed(op.inputs[slot])[0]
        if gradient is not None and gradient.op.type not in KNOWN:
            readers = (one for one in gradient.consumers() if one in types)
            bias = next((one for one in readers if types[one] == "BiasAddGrad" and one not in twins), None)
            if bias is not None:
                twins[bias] = op
    return twins


def _passed(tensor: Any) -> tuple[Any, list[Any]]:
    """What ``tensor`` shows through each ``Identity`` before it, and these."""
    identities = []
    while tensor.op.type == "Identity":
        identities.append(tensor.op)
        tensor = tensor.op.inputs[0]
    return tensor, identities


@dataclass(frozen=True)
class Barriers:
    """What stands between twins, and how the engine goes round it.

    With both as one op the barrier waits for no twin, or the two would wait for each other. What else reads
    behind the barrier waits for that one op instead, so that no edge of a plan can contradict the graph,
    whether the barrier is taken away or not.
    """

    identities: frozenset[Any] = frozenset()
    """Between the gradient and its reader."""
    lifted: frozenset[tuple[Any, Any]] = frozenset()
    """(op, control input) that counts no more."""
    waits: Mapping[Any, Sequence[Any]] = field(default_factory=dict)
    """By reader the ops it waits for."""

    @classmethod
    def between(cls, twins: Mapping[Any, Any]) -> "Barriers":
        """The barriers between each key of ``twins`` and the op it is merged into."""
        identities: set[Any] = set()
        lifted: set[tuple[Any, Any]] = set()
        waits: dict[Any, list[Any]] = {}
        for twin, first in twins.items():
            for identity in _passed(first.inputs[TWIN_SLOTS[first.type]])[1]:
                found = [op for op in _barrier_of(identity) if twin in op.control_inputs]
                if found:
                    identities.add(identity)
                    lifted.update((op, twin) for op in found)
                    for reader in {*identity.outputs[0].consumers(), *identity._control_outputs} - {first}:
                        waits.setdefault(reader, []).append(first)
        return cls(frozenset(identities), frozenset(lifted), waits)

    def controls(self, op: Any) -> list[Any]:
        """The ops that ``op`` waits for beside its inputs."""
        if not self.lifted:  # nothing waits for a first twin either
            return list(op.control_inputs)
        waiting = [control for control in op.control_inputs if (op, control) not in self.lifted]
        return [*waiting, *self.waits.get(op, ())]


def _barrier_of(identity: Any) -> Iterator[Any]:
    """``identity`` itself and the ops without effect that it waits for."""
    yield identity
    for control in identity.control_inputs:
        if control.type == "NoOp":
            yield from _barrier_of(control)
