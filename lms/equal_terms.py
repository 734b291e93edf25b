"""Settles which of several equal ops remains, where that decides in which order numbers are added.

Grappler merges equal ops into the one that its order of the graph puts first, and sorts the inputs of a sum
by name. A sum of three or more then begins with other terms where another of the equal ops remains, and the
last digits differ. The edges of a plan change that order. So Grappler is asked, before anything is edited,
which ones it keeps; what reads the others reads these from then on, and nothing is left to be chosen.

Sources: ``common_subgraph_elimination.cc``, ``model_pruner.cc`` and ``canonicalizer.cc`` of TensorFlow.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2, node_def_pb2
from tensorflow.core.protobuf import (
    config_pb2,
    device_properties_pb2,
    meta_graph_pb2,
    rewriter_config_pb2,
)
from tensorflow.python.framework.func_graph import FuncGraph
from tensorflow.python.grappler import cluster as grappler_cluster
from tensorflow.python.grappler import tf_optimizer

from lms.grappler import merges_equal_ops
from lms.step import is_stateful
from lms.tf_graph import schedule

logger = logging.getLogger("lms")

ORDERED = 3
"""Of fewer terms the sum is the same in any order."""

SUM = "AddN"

PASSES = ("pruning", "common_subgraph_elimination")
"""The optimizers that decide it, in the order in which they run."""

DEVICE = device_properties_pb2.NamedDevice(
    name="/job:localhost/replica:0/task:0/device:CPU:0",
    properties=device_properties_pb2.DeviceProperties(type="CPU"),
)
"""Neither of them looks at devices, but none runs without one."""

Redirected = list[Callable[[], None]]
"""What puts each change back."""


def settle(tf_graph: Any) -> Redirected:
    """Let the sums of a function that is not edited yet read those of equal ops that remain without an edit.

    Returns:
        What :func:`undo` needs to put it back.
    """
    if not isinstance(tf_graph, FuncGraph) or not merges_equal_ops():
        return []
    ops = tf_graph.get_operations()
    sums = [op for op in ops if op.type == SUM and len(op.inputs) >= ORDERED]
    if not sums or not _could_matter(sums, ops):
        return []
    equal = _equal_ops(schedule(ops), tf_graph.as_graph_def().node)
    unsettled = {id(equal[term]): equal[term] for op in sums for term in _terms(op) if len(equal[term]) > 1}
    if not any(_may_change_places([equal[term] for term in _terms(op)]) for op in sums):
        return []
    kept = _kept(tf_graph)
    redirected: Redirected = []
    for members in unsettled.values():
        remaining = [op for op in members if op.name in kept]
        if len(remaining) == 1:
            for op in members:
                if op is not remaining[0]:
                    redirected += redirect(op, remaining[0])
    return redirected


def undo(redirected: Redirected) -> None:
    """Let everything read again what it read before; what was changed last goes back first."""
    for put_back in reversed(redirected):
        put_back()


def _could_matter(sums: Sequence[Any], ops: Sequence[Any]) -> bool:
    """Whether terms may have equals that change their order, at a look that costs a third of it all.

    Ops that read the same count as equal if their types are, whatever their attributes. Where that would
    change no order, those that are equal do not either.
    """
    numbers: dict[Any, int] = {}
    number_of: dict[Any, int] = {}
    members: dict[int, list[Any]] = {}
    for op in ops:
        look: Any = op
        if not is_stateful(op.type):
            read = [_seen_through(tensor) for tensor in op.inputs]
            if any(tensor.op not in number_of for tensor in read):
                return True  # not in the order in which they run
            look = op.type, *((number_of[tensor.op], tensor.value_index) for tensor in read)
        number = number_of[op] = numbers.setdefault(look, len(numbers))
        members.setdefault(number, []).append(op)
    return any(_may_change_places([members[number_of[term]] for term in _terms(op)]) for op in sums)


def _terms(op: Any) -> Iterator[Any]:
    """The ops whose results are added, as they are named when nothing is left between."""
    return (_seen_through(tensor).op for tensor in op.inputs)


def _seen_through(tensor: Any) -> Any:
    while tensor.op.type == "Identity" and not tensor.op.control_inputs:
        tensor = tensor.op.inputs[0]
    return tensor


def _equal_ops(ops: Sequence[Any], nodes: Sequence[Any]) -> dict[Any, list[Any]]:
    """For each op all that compute the same from the same, and wait for the same; ``ops`` as they run.

    So what reads or waits for one of them can read or wait for another: nothing that comes later leads there.
    """
    described = {node.name: node for node in nodes}
    classes: dict[Any, list[Any]] = {}
    class_of: dict[Any, list[Any]] = {}
    for op in ops:
        read = [_seen_through(tensor) for tensor in op.inputs]
        key: Any = op
        if not is_stateful(op.type) and class_of.keys() >= {*(t.op for t in read), *op.control_inputs}:
            inputs = tuple((id(class_of[tensor.op]), tensor.value_index) for tensor in read)
            waits = frozenset(id(class_of[before]) for before in op.control_inputs)
            key = _described(described[op.name]), inputs, waits
        class_of[op] = classes.setdefault(key, [])
        class_of[op].append(op)
    return class_of


def _described(node: Any) -> bytes:
    """Type, device and attributes."""
    without_name = node_def_pb2.NodeDef(op=node.op, device=node.device)
    for name, value in node.attr.items():
        without_name.attr[name].CopyFrom(value)
    text: bytes = without_name.SerializeToString(deterministic=True)
    return text


def _may_change_places(terms: Sequence[Sequence[Any]]) -> bool:
    """Whether the order of terms by name depends on which op of each class remains."""
    spans = sorted((min(op.name for op in term), max(op.name for op in term)) for term in terms)
    return any(end >= start for (_, end), (start, _) in zip(spans, spans[1:], strict=False))


def _kept(tf_graph: Any) -> set[str]:
    """The names of the ops that Grappler keeps of the function, were it run as it is."""
    meta_graph = meta_graph_pb2.MetaGraphDef()
    meta_graph.graph_def.CopyFrom(tf_graph.as_graph_def())
    ends = [op.name for op in tf_graph.control_outputs]
    for index, tensor in enumerate(tf_graph.outputs):
        result = meta_graph.graph_def.node.add(name=f"{_as_result(tensor)}_RetVal", op="_Retval")
        result.input.append(tensor.name.removesuffix(":0"))
        result.attr["T"].type = tensor.dtype.as_datatype_enum
        result.attr["index"].CopyFrom(attr_value_pb2.AttrValue(i=index))
        ends.append(result.name)
    meta_graph.collection_def["train_op"].node_list.value.extend(ends)
    config = config_pb2.ConfigProto()
    rewrite = config.graph_options.rewrite_options
    rewrite.optimizers.extend(PASSES)
    rewrite.meta_optimizer_iterations = rewriter_config_pb2.RewriterConfig.ONE
    rewrite.min_graph_nodes = -1
    devices = grappler_cluster.Cluster(devices=[DEVICE])
    try:
        optimized = tf_optimizer.OptimizeGraph(config, meta_graph, verbose=False, cluster=devices)
    except (tf.errors.OpError, ValueError) as error:
        logger.info("%s: which equal ops remain is not known: %s", tf_graph.name, error)
        return set()
    return {node.name for node in optimized.node}


def _as_result(tensor: Any) -> str:
    """How TensorFlow names a function's result after the op that makes it."""
    return "".join(letter if letter.isalnum() else "_" for letter in tensor.op.name.lower())


def redirect(op: Any, other: Any) -> Redirected:
    """Let what reads or waits for ``op`` read or wait for an equal op."""
    changed: Redirected = []
    for tensor, instead in zip(op.outputs, other.outputs, strict=True):
        for reader in dict.fromkeys(tensor.consumers()):
            for slot, read in enumerate(reader.inputs):
                if read is tensor:
                    reader._update_input(slot, instead)
                    changed.append(partial(reader._update_input, slot, tensor))
    for waiting in op._control_outputs:
        before = list(waiting.control_inputs)
        _wait_for(waiting, [other if one is op else one for one in before])
        changed.append(partial(_wait_for, waiting, before))
    return changed


def _wait_for(op: Any, others: Sequence[Any]) -> None:
    op._remove_all_control_inputs()
    op._add_control_inputs(list(dict.fromkeys(others)))
