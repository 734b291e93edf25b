"""What a step leaves behind beside the values of variables: whoever tries it again must not have it twice.

Random ops that count in their own kernel are no matter here: a step that is tried again is traced again, its
kernels are new, and draw what the first ones drew.
"""

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from lms.handles import outermost, value_type
from lms.peers import may_reach_peers, runs_python
from lms.tf_graph import BODY_ATTRS, all_ops

TAKES_BATCH = ("IteratorGetNext", "MultiDeviceIteratorGetNext")
"""How the types of ops begin that take a batch from an iterator."""

LASTING = {
    "it goes through a dataset, which may give other batches the second time; pass an iterator": (
        "MakeIterator",
        "OneShotIterator",
        "ReduceDataset",
    ),
    "it changes a lookup table": (
        "InitializeTable",
        "LookupTableImport",
        "LookupTableInsert",
        "LookupTableRemove",
    ),
    "it moves items of a queue": (
        "Barrier",
        "MapStage",
        "MapUnstage",
        "OrderedMap",
        "QueueDequeue",
        "QueueEnqueue",
        "Stage",
        "Unstage",
    ),
    "it feeds an accumulator": ("AccumulatorApply", "AccumulatorTake", "ResourceAccumulator"),
}
"""What ops do whose effect lasts, and how their types begin."""


def cannot_be_undone(tf_graphs: Iterable[Any], *, batches_are_kept: bool) -> str:
    """Why the step in these graphs must not be run again; empty where it may.

    Args:
        tf_graphs: The graphs that were traced for the step.
        batches_are_kept: Whether every iterator among the step's arguments gives the same batches again.
    """
    for tf_graph in tf_graphs:
        if may_reach_peers(tf_graph):
            return "other ranks may have received a part of it already"
        types = {op.type for op in all_ops(tf_graph)}
        if any(op_type.startswith(TAKES_BATCH) for op_type in types) and (
            not batches_are_kept or _takes_from_elsewhere(tf_graph)
        ):
            return (
                "it has taken batches that were not kept, and would get others now: those of an iterator "
                "that is none of its arguments, of a distribution strategy, of rows of ragged tensors, "
                "on a GPU, or in a later trace; pass a plain iterator to the tf.function"
            )
        for what, beginnings in LASTING.items():
            if any(op_type.startswith(beginnings) for op_type in types):
                return what
    return ""


def has_python(tf_graphs: Iterable[Any]) -> bool:
    """Whether Python code of the user is a part of the step."""
    return any(runs_python(op) for tf_graph in tf_graphs for op in all_ops(tf_graph))


def _takes_from_elsewhere(tf_graph: Any) -> bool:
    """Whether an iterator may be among what the graph captures.

    A resource that is no variable may be a table as well. It is taken for an iterator where an op takes
    batches from it, or a body that might gets it.
    """
    for captured, inner in tf_graph.captures:
        handle = outermost(captured)
        if handle is not None and handle.dtype == tf.resource and value_type(handle) is None:
            readers = [op.type for op in inner.consumers()]
            if any(one.startswith(TAKES_BATCH) or one in BODY_ATTRS for one in readers):
                return True
    return False
