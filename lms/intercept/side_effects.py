"""Find the side effects of a step, besides the values of variables, that forbid to run it twice.

Random ops that count in their own kernel are no matter here: a step that is tried again is optimized again,
its kernels are new, and draw what the first ones drew.
"""

from collections.abc import Collection, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context
from tensorflow.python.framework import op_def_registry

from lms.ir.op_traits import is_collective, is_update
from lms.process_state import has_peers
from lms.reader.node_table import NodeTable

PYTHON_TYPES = frozenset({"PyFunc", "EagerPyFunc"})
"""Ops that run Python code with effects of its own. ``PyFuncStateless`` has none."""

TAKES_BATCH = ("IteratorGetNext", "MultiDeviceIteratorGetNext")
"""Beginnings of the types of ops that take a batch from an iterator."""

GOES_THROUGH = ("MakeIterator", "OneShotIterator", "ReduceDataset")
"""Beginnings of the types of ops that begin a dataset anew each time that they run."""

LASTING = {
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
"""The lasting effects of ops, each with the beginnings of their types."""

DATASET = "Dataset"
"""The end of the types of ops that are, or go through, a dataset."""

SEEDS = ("seed", "seed2")
"""Attributes of the ops that draw random numbers, 0 where nobody has set a seed."""

PASSES_ON = frozenset({"Enter", "Identity", "Merge", "Switch"})
"""Ops that stand between an iterator's handle and the op that takes from it, in a loop."""


def cannot_be_undone(table: NodeTable, inputs: Sequence[Any], kept: Collection[Any]) -> str:
    """Return why the step in this graph must not be run again; empty where it may.

    Args:
        table: The step.
        inputs: What the function is called with.
        kept: The handles of iterators that give the same batches again.
    """
    types = set(table.types)
    if may_reach_peers(types):
        return "other ranks may have received a part of it already"
    if not all(_is_kept(table, node, inputs, kept) for node in _takers(table)):
        return (
            "it has taken batches that were not kept, and would get others now: those of an iterator "
            "that is none of its arguments, of a distribution strategy, of rows of ragged tensors, "
            "on a GPU, or in a later trace; pass a plain iterator to the tf.function"
        )
    for what, beginnings in LASTING.items():
        if any(op_type.startswith(beginnings) for op_type in types):
            return what
    return ""


def may_reach_peers(types: Collection[str]) -> bool:
    """Tell whether running ops of these types may send something to other ranks.

    Collectives do. So may Python code (``tf.py_function``), whose calls no graph shows.
    """
    return any(map(is_collective, types)) or (has_peers() and not PYTHON_TYPES.isdisjoint(types))


def runs_python(table: NodeTable) -> bool:
    """Tell whether Python code of the user is a part of the step."""
    return not PYTHON_TYPES.isdisjoint(table.types)


def goes_through_dataset(table: NodeTable) -> bool:
    """Tell whether the step begins a dataset, which begins anew where the step runs again."""
    return any(op_type.startswith(GOES_THROUGH) for op_type in table.types)


def acts_around_bodies(name: str) -> bool:
    """Tell whether a function changes variables, or reaches other ranks, outside of what its datasets call.

    Where a body is planned it has begun: what it has changed before is not known any more.
    """
    seen, wanted = {name}, [name]
    while wanted:
        try:
            definition = context.context().get_function_def(wanted.pop())
        except tf.errors.OpError:
            return True
        for node in definition.node_def:
            if is_update(node.op) or may_reach_peers([node.op]):
                return True
            if not node.op.endswith(DATASET):
                called = {one.func.name for one in node.attr.values() if one.HasField("func")} - seen
                seen |= called
                wanted += called
    return False


def draws_from_seed(table: NodeTable) -> bool:
    """Tell whether a kernel of the step counts its own random numbers, and begins them from a seed."""
    seeded = {op_type for op_type in {*table.types} if _may_have_seed(op_type)}
    nodes = (node for node, op_type in zip(table.nodes, table.types, strict=True) if op_type in seeded)
    return any(node.attr[seed].i for node in nodes for seed in SEEDS if seed in node.attr)


def _may_have_seed(op_type: str) -> bool:
    definition = op_def_registry.get(op_type)
    return definition is None or any(attr.name in SEEDS for attr in definition.attr)


def _takers(table: NodeTable) -> list[int]:
    return [node for node, op_type in enumerate(table.types) if op_type.startswith(TAKES_BATCH)]


def _is_kept(table: NodeTable, taker: int, inputs: Sequence[Any], kept: Collection[Any]) -> bool:
    """Tell whether ``taker`` takes its batch from an iterator whose batches are kept."""
    node = table.inputs[taker][0].node
    while table.types[node] in PASSES_ON:
        node = table.inputs[node][0].node
    if table.types[node] != "_Arg":
        return False
    number = table.nodes[node].attr["index"].i
    return number < len(inputs) and any(inputs[number] is one for one in kept)
