"""What a function that XLA compiles (:data:`lms.inline.COMPILED_LAYERS`) needs for itself on a CPU."""

import math
from collections.abc import Iterable
from typing import Any

MUST_COMPILE = "_XlaMustCompile"

FILTER_GRADIENTS = frozenset({"Conv2DBackpropFilter", "Conv3DBackpropFilterV2"})

COPIES = 2
"""How many filters over all channels XLA holds for the gradient of a depthwise one."""


def is_compiled(op: Any) -> bool:
    """Whether an op calls a function that XLA compiles."""
    return MUST_COMPILE in op.node_def.attr and bool(op.get_attr(MUST_COMPILE))


def scratch_bytes(ops: Iterable[Any]) -> int:
    """The most that one of the ops of such a function needs beside what it reads and makes.

    That is none, but for the gradient of a filter with one channel a group: XLA takes such a convolution for
    one over all channels, and picks the filter's part of the result. Seen on TensorFlow 2.21 with 7x7 filters
    of 96 and of 768 channels, 3.4 and 220.8 MiB; with two and more channels a group nothing.
    """
    return max((_dense_filter_bytes(op) for op in ops if op.type in FILTER_GRADIENTS), default=0) * COPIES


def _dense_filter_bytes(op: Any) -> int:
    shape = op.outputs[0].shape
    if not shape.is_fully_defined() or shape[-2] != 1:
        return 0
    *window, _, channels = shape.as_list()
    return int(math.prod(window) * channels * channels * op.outputs[0].dtype.size)
