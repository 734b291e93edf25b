"""Loops that keep lists for their backward pass: memory that no plan sees, and no swap moves."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

LOOPS = ("StatelessWhile", "While")


def loops_with_lists(ops: Sequence[Any]) -> list[str]:
    """The names of the loops of a step whose lists another loop reads, as the gradient of a loop does.

    What a forward pass adds in each turn lies in a list behind one variant tensor, whose size nobody knows
    before it has run.
    """
    return [op.name for op in ops if op.type in LOOPS and any(map(_is_read_by_loop, op.outputs))]


def _is_read_by_loop(tensor: Any) -> bool:
    return tensor.dtype == tf.variant and any(reader.type in LOOPS for reader in tensor.consumers())
