"""Find the side effects of a step, besides the values of variables, that forbid to run it twice.

Random ops that count in their own kernel are no matter here: a step that is tried again is optimized again,
its kernels are new, and draw what the first ones drew.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import op_def_registry
from tensorflow.python.util import compat

from lms.ir.op_traits import (
    APART_TYPES,
    ASKS_ABOUT_PEERS,
    PYTHON_TYPES,
    STATES_UNDONE,
    is_collective,
    is_update,
    lasting_effect,
)
from lms.process_state import has_peers
from lms.reader.called_functions import called_by, calls_functions, nodes_reached, nodes_within
from lms.reader.node_table import ROOT, NodeTable
from lms.variables.handles import value_type

TAKES_BATCH = ("IteratorGetNext", "MultiDeviceIteratorGetNext")
"""Beginnings of the types of ops that take a batch from an iterator."""

GOES_THROUGH = ("DatasetToSingleElement", "MakeIterator", "OneShotIterator", "ReduceDataset")
"""Beginnings of the types of ops that begin a dataset: anew each time, but for ``OneShotIterator``."""

OF_TABLE = ("InitializeTable", "LookupTableImport", "LookupTableInsert", "LookupTableRemove")
"""Beginnings of the types of ops that change a lookup table."""

NEVER_THE_SAME = (
    *("GeneratorDataset", "NonDeterministicInts", "RngReadAndSkip", "RngSkip", "StatefulRandomBinomial"),
    *("StatefulStandardNormal", "StatefulTruncatedNormal", "StatefulUniform"),
    *("CountUpTo", "ResourceCountUpTo", "ResourceStridedSliceAssign", "Scatter", "StridedSliceAssign"),
)
"""Beginnings of the types of ops of a pipeline with a state that nobody can put back: of Python code, of a
random generator, of variables beside those that :func:`is_update` knows."""

PURE_SCATTERS = frozenset({"ScatterNd", "ScatterNdNonAliasingAdd"})
"""Ops that begin like one that changes a variable, and make a tensor."""

OF_FUNCTION = (
    "those of an iterator that is none of its arguments, of a distribution strategy, of rows of ragged "
    "tensors, on a GPU, or in a later trace; pass a plain iterator to the tf.function"
)
OF_SESSION = "those of an iterator of the session; feed the batches"
"""The batches that are not kept, and what to do."""

UNKNOWN_STATE = "it prints or writes something, or has a state that is not known"

PEERS = "other ranks may have received a part of it already"

SEEDS = ("file_random_seed", "seed", "seed2")
"""Attributes of the ops that draw random numbers, 0 where nobody has set a seed."""

PASSES_ON = frozenset({"Enter", "Identity", "Merge", "Switch", "_SwitchN"})
"""Ops that stand between an iterator's handle and the op that takes from it, in a loop."""

MAKES_ITERATOR = ("AnonymousIterator", "AnonymousIteratorV2", "AnonymousIteratorV3")
"""Ops that make an iterator of the step's own, as ``iter(dataset)`` does: each time that they run anew."""

WITH_OWN_ITERATORS = frozenset({*MAKES_ITERATOR, "DeleteIterator", "MakeIterator"})
"""Ops on iterators, besides :data:`TAKES_BATCH`, of a step whose iterators are all its own. Other ops keep an
iterator between steps, or reach one by its name."""


def cannot_be_undone(
    table: NodeTable,
    inputs: Sequence[Any],
    kept: Collection[Any],
    *,
    in_session: bool = False,
    apart: bool = False,
) -> str:
    """Return why the step in this graph must not be run again; empty where it may.

    Args:
        table: The step.
        inputs: What the function is called with.
        kept: The handles of iterators that give the same batches again.
        in_session: Whether a session runs it.
        apart: Whether it runs apart from other ranks, also where it has memory enough.
    """
    called = {node.op for node in _nodes_called(table)}
    types = {*table.types, *called}
    types -= _copied(table) | ASKS_ABOUT_PEERS - called if apart else set()
    if may_reach_peers(types):
        return PEERS
    if apart and (goes_through_dataset(types) or any(map(_has_unknown_state, types))):
        return UNKNOWN_STATE
    if not all(_is_kept(table, node, inputs, kept) for node in _takers(table)):
        which = OF_SESSION if in_session else OF_FUNCTION
        return f"it has taken batches that were not kept, and would get others now: {which}"
    return _lasting(types)


def _copied(table: NodeTable) -> set[str]:
    """Return the types of a step's collectives for all of which copies may stand.

    The turns of a loop may hang on what ranks make together, and some ranks of a process set are none of it.
    """
    found: dict[str, bool] = {}
    for node, op_type in enumerate(table.types):
        if op_type in APART_TYPES:
            is_plain = table.frame[node] == ROOT and not table.nodes[node].attr["process_set_id"].i
            found[op_type] = found.get(op_type, True) and is_plain
    return {op_type for op_type, is_plain in found.items() if is_plain}


def _has_unknown_state(op_type: str) -> bool:
    definition = op_def_registry.get(op_type)
    is_stateful = definition is None or definition.is_stateful
    is_known = is_update(op_type) or op_type in ASKS_ABOUT_PEERS or op_type.startswith((*STATES_UNDONE, "_"))
    return is_stateful and not is_known


def exchanges(name: str) -> bool:
    """Tell whether a function of the runtime has collectives for which copies may stand."""
    return not APART_TYPES.isdisjoint(types_reached([name]))


def folds_exchanges(name: str, table: NodeTable) -> bool:
    """Tell whether TensorFlow may have exchanged constants with other ranks while it optimized a function.

    It works out what depends on constants alone, and Horovod's ops are not marked as having a state. It does
    so again each time that it optimizes the function, and waits for the other ranks then.

    Args:
        name: The function of the runtime.
        table: Its graph behind TensorFlow's own passes.
    """
    traced = sum(node.op in APART_TYPES for node in nodes_within([name]))
    return traced > sum(op_type in APART_TYPES for op_type in table.types)


def may_reach_peers(types: Collection[str]) -> bool:
    """Tell whether running ops of these types may send something to other ranks.

    Collectives do. So may Python code (``tf.py_function``), whose calls no graph shows.
    """
    return any(map(is_collective, types)) or (has_peers() and not PYTHON_TYPES.isdisjoint(types))


def runs_python(types: Iterable[str]) -> bool:
    """Tell whether Python code of the user is among ops of these types."""
    return not PYTHON_TYPES.isdisjoint(types)


def goes_through_dataset(types: Iterable[str]) -> bool:
    """Tell whether ops of these types begin a dataset, which begins anew where they run again."""
    return any(op_type.startswith(GOES_THROUGH) for op_type in types)


def types_reached(names: Iterable[str]) -> frozenset[str]:
    """Return the types of all ops in functions, and in all functions that these may call."""
    return frozenset(node.op for node in nodes_within(names))


def _nodes_called(table: NodeTable) -> Iterator[Any]:
    """Yield the nodes of the functions of the runtime that a step may call, and of those that these may."""
    return nodes_reached(
        node for node, op_type in zip(table.nodes, table.types, strict=True) if calls_functions(op_type)
    )


def cannot_begin_anew(name: str, inputs: Sequence[Any], datasets: Sequence[Any]) -> str:
    """Return why a function that goes through datasets must not be run again; empty where it may.

    Args:
        name: The function's.
        inputs: What it is called with.
        datasets: Those among the arguments of the call.
    """
    nodes = [*nodes_within([name])]
    types = {node.op for node in nodes}
    if may_reach_peers(types):
        return PEERS
    known = [dataset._variant_tensor for dataset in datasets]
    if not all(any(one is other for other in known) for one in inputs if one.dtype == tf.variant):
        return "it goes through a dataset that is none of its arguments; pass it to the tf.function"
    steps = _pipeline_types(datasets, nodes)
    if runs_python(steps) or any(map(_is_never_the_same, steps)):
        return (
            "the dataset that it goes through runs Python code or changes variables, and may not give the "
            "same the second time; pass an iterator"
        )
    if any(op_type.startswith(TAKES_BATCH) for op_type in steps):
        return "the dataset that it goes through takes batches of an iterator, which are not kept"
    if any(op_type.startswith(TAKES_BATCH) for op_type in types) and not _has_own_iterators(types, inputs):
        return (
            "it takes batches, and of an iterator that may not be its own: it has one that lasts, or is "
            "called with a table or another resource that is no variable"
        )
    return _lasting((*types, *steps))


def _is_never_the_same(op_type: str) -> bool:
    changes = is_update(op_type) or op_type.startswith(NEVER_THE_SAME)
    return changes and op_type not in PURE_SCATTERS


def _has_own_iterators(types: Iterable[str], inputs: Sequence[Any]) -> bool:
    """Tell whether the batches that a function takes can only be those of iterators that it makes."""
    of_iterators = (one for one in types if "Iterator" in one and not one.startswith(TAKES_BATCH))
    variables_alone = all(one.dtype != tf.resource or value_type(one) is not None for one in inputs)
    return variables_alone and WITH_OWN_ITERATORS.issuperset(of_iterators)


def _pipeline_types(datasets: Sequence[Any], nodes: Iterable[Any]) -> frozenset[str]:
    """Return the types of the ops of pipelines: of those among the arguments, and those made in the step."""
    wanted, names = [*datasets], []
    while wanted:
        dataset = wanted.pop()
        wanted += dataset._inputs()
        names += [compat.as_str(one.function.name) for one in dataset._functions()]
    made = [node for node in nodes if "Dataset" in node.op and not _is_loop(node)]
    for node in made:
        names += called_by(node)
    return types_reached(names) | {node.op for node in made}


def _is_loop(node: Any) -> bool:
    """Tell whether a dataset's op is a loop over it, whose function is a part of the step.

    AutoGraph makes ``for x in dataset`` of a reduction and of a scan that runs where the step does
    (``dataset_autograph.py``).
    """
    scans = node.op == "ScanDataset" and not node.attr["use_default_device"].b
    return scans or node.op == "ReduceDataset"


def _lasting(types: Iterable[str]) -> str:
    effects = (
        "it changes a lookup table" if op_type.startswith(OF_TABLE) else lasting_effect(op_type)
        for op_type in types
    )
    return min(filter(None, effects), default="")


def draws_from_seed(table: NodeTable) -> bool:
    """Tell whether a kernel of the step, or of a function that it calls, begins random numbers from a seed.

    Such a kernel counts what it has drawn, and a new one begins anew.
    """
    seeded = {op_type for op_type in {*table.types} if _may_have_seed(op_type)}
    nodes = (node for node, op_type in zip(table.nodes, table.types, strict=True) if op_type in seeded)
    return any(map(_is_seeded, nodes)) or any(map(_is_seeded, _nodes_called(table)))


def functions_draw_from_seed(graph: Any, table: NodeTable) -> bool:
    """Tell whether a function that a session's step calls may count its own random numbers from a seed.

    A session keeps the kernels of the step itself, which draw on, but not those within functions.

    Args:
        graph: The session's graph.
        table: The step.
    """
    if not any(map(calls_functions, {*table.types})):
        return False
    nodes = (node for function in graph.as_graph_def().library.function for node in function.node_def)
    return any(map(_is_seeded, nodes))


def _is_seeded(node: Any) -> bool:
    return any(node.attr[seed].i for seed in SEEDS if seed in node.attr)


def _may_have_seed(op_type: str) -> bool:
    definition = op_def_registry.get(op_type)
    return definition is None or any(attr.name in SEEDS for attr in definition.attr)


def _takers(table: NodeTable) -> list[int]:
    return [node for node, op_type in enumerate(table.types) if op_type.startswith(TAKES_BATCH)]


def _is_kept(table: NodeTable, taker: int, inputs: Sequence[Any], kept: Collection[Any]) -> bool:
    """Tell whether ``taker`` takes its batch from an iterator whose batches are kept, or of the step's own.

    Whether the latter may begin anew is for :func:`cannot_begin_anew` to say.
    """
    node = table.inputs[taker][0].node
    while table.types[node] in PASSES_ON:
        node = table.inputs[node][0].node
    if table.types[node] in MAKES_ITERATOR:
        return True
    if table.types[node] != "_Arg":
        return False
    number = table.nodes[node].attr["index"].i
    return number < len(inputs) and any(inputs[number] is one for one in kept)
