"""Find the size of the batches that a ``tf.data`` pipeline gives, where its steps say it."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.data.experimental.ops.distribute import _AutoShardDataset
from tensorflow.python.data.ops.dataset_ops import UnaryUnchangedStructureDataset

from lms.reader.shapes import infer, make_known

BATCH_SIZES = ("_batch_size", "_batch_size_t", "_batch_sizes")
"""Names what a batching step of a pipeline has; ``map_and_batch`` has the second, which maps first, and the
third the step with which a distribution strategy divides batches among its devices."""

DEEPEST = 64
"""The number of steps of a pipeline that are searched at most."""


def pipelines_of(source: Any) -> list[Any]:
    """Return the pipelines behind a dataset or an iterator, which a strategy may have divided."""
    if isinstance(source, tf.distribute.DistributedDataset):
        return getattr(source, "_cloned_datasets", None) or getattr(source, "_datasets", [])
    if isinstance(source, tf.distribute.DistributedIterator):
        return [getattr(one, "_dataset", None) for one in source._iterators]
    return [source if isinstance(source, tf.data.Dataset) else getattr(source, "_dataset", None)]


def dataset_batch_size(dataset: Any) -> int | None:
    """Return the batch size that a pipeline was built with, when its last batching step says it."""
    for _ in range(DEEPEST):
        if _is_batching(dataset):
            return _own_batch_size(dataset)
        dataset = getattr(dataset, "_input_dataset", None)
        if dataset is None:
            return None
    return None


def gone_through_batch_size(datasets: Sequence[Any]) -> int | None:
    """Return the batch size of the datasets that a function goes through itself.

    That is ``for batch in dataset``. No batch can be looked at before the step: a pipeline may be costly, or
    never give the same again. So all that stands behind the batching step must be known to keep its size;
    ``None`` where it is not, or where two datasets differ.
    """
    sizes = {_kept_batch_size(dataset) for dataset in datasets}
    return sizes.pop() if len(sizes) == 1 else None


def _kept_batch_size(dataset: Any) -> int | None:
    """Return the size of a dataset's whole batches; a smaller last one runs through the same graph."""
    if isinstance(dataset, UnaryUnchangedStructureDataset | _AutoShardDataset):  # prefetches, shuffles, ...
        return _kept_batch_size(dataset._input_dataset)
    if hasattr(dataset, "_map_func") and not _is_batching(dataset):
        size = _kept_batch_size(getattr(dataset, "_input_dataset", None))
        graph = dataset._map_func.function.graph
        return size if size is not None and _keeps_size(graph, size) else None
    return _own_batch_size(dataset)


def _is_batching(dataset: Any) -> bool:
    return any(hasattr(dataset, name) for name in BATCH_SIZES)


def _own_batch_size(dataset: Any) -> int | None:
    """Return the size of the batches that this step of a pipeline makes itself."""
    sizes = (tf.get_static_value(getattr(dataset, name, None)) for name in BATCH_SIZES)
    return next((int(np.max(size)) for size in sizes if size is not None), None)


def _keeps_size(graph: Any, size: int) -> bool:
    """Tell whether each output of ``graph`` has ``size`` rows again when its batches have."""
    graph_def = graph.as_graph_def()
    for node in graph_def.node:
        shape, dtype = node.attr["shape"].shape, node.attr["dtype"].type
        if node.op == "Placeholder" and shape.dim and dtype != tf.resource.as_datatype_enum:
            sizes = [size if dim.size < 0 and not place else dim.size for place, dim in enumerate(shape.dim)]
            make_known(node, dtype, sizes)
    try:
        known = infer(graph_def, [output.op.name for output in graph.outputs])
        made = [known[output.op.name][output.value_index].dims for output in graph.outputs]
    except (tf.errors.OpError, LookupError, ValueError, RuntimeError):
        return False
    return all(dims and dims[0] == size for dims in made)
