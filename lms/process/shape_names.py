"""Types and shapes of a step's tensors in words, for the report."""

from collections.abc import Mapping, Sequence
from functools import lru_cache

import tensorflow as tf

from lms.optimizer.grappler_item import Output
from lms.reader.step_reader import Step

LEAST_BYTES = 4096
"""Smaller tensors are of no interest."""


def shapes_of(step: Step, outputs: Sequence[Sequence[Output]]) -> Mapping[str, str]:
    """Write the type and shape of each larger tensor, by its name: ``float32 32x56x56x64``."""
    found = {}
    for tensor, source in zip(step.graph.tensors, step.sources, strict=True):
        if source is None or (tensor.nbytes or 0) < LEAST_BYTES or source.node >= len(outputs):
            continue
        made = outputs[source.node]
        if source.index < len(made):
            found[step.graph.tensor_name(tensor.id)] = _words(made[source.index])
    return found


@lru_cache(maxsize=4096)
def _words(output: Output) -> str:
    name = tf.dtypes.as_dtype(output.dtype).name
    if output.dims is None:
        return f"{name}, shape unknown"
    return f"{name} {'x'.join('?' if size < 0 else str(size) for size in output.dims) or 'scalar'}"
