"""Loops that keep lists for their backward pass: memory that no plan sees, and no swap moves."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

LOOPS = ("StatelessWhile", "While")
CALLS = ("PartitionedCall", "StatefulPartitionedCall")
"""Keras 2 has the loop of an LSTM in a function of its own, and that of the gradient in another."""


def loops_with_lists(ops: Sequence[Any]) -> list[str]:
    """The names of the loops of a step, or of calls with one, whose lists another reads, as gradients do.

    What a forward pass adds in each turn lies in a list behind one variant tensor, whose size nobody knows
    before it has run.
    """
    found = (op for kind in (LOOPS, CALLS) for op in ops if op.type in kind and _keeps_lists(op, kind))
    return [op.name for op in found]


def _keeps_lists(op: Any, readers: Sequence[str]) -> bool:
    lists = (output for output in op.outputs if output.dtype == tf.variant)
    return any(reader.type in readers for kept in lists for reader in kept.consumers())
