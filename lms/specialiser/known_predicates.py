"""Find the predicates of conditions that a call decides: what is fed, and what is computed from it alone."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from lms.reader.node_table import SWITCHES, NodeTable, Source

DEFAULT = "PlaceholderWithDefault"
"""A placeholder that gives what it reads, unless it is fed."""

PASSING = frozenset({"Identity", "StopGradient", "Snapshot", DEFAULT})
"""Types of ops that give what they read."""
COMPUTED: Mapping[str, Callable[..., bool]] = {
    "LogicalNot": lambda a: not a,
    "LogicalAnd": lambda a, b: a and b,
    "LogicalOr": lambda a, b: a or b,
}
"""What others compute from predicates."""

PARTING = SWITCHES - {"_SwitchN"}
"""Types of the ops that hand their input on to one of two branches: if the predicate holds the second."""
CONDITIONS = frozenset({"If", "StatelessIf", *SWITCHES})
"""Types of ops that part the branches of a condition."""
CALLS = frozenset({"PartitionedCall", "StatefulPartitionedCall"})
"""Types of ops whose functions may hold conditions."""


def known_predicates(table: NodeTable, fed: Mapping[str, bool]) -> dict[Source, bool]:
    """Return the predicates of a graph that do not depend on its tensors.

    Args:
        table: The graph of a session.
        fed: The predicates that are fed, by the names of their nodes.
    """
    known: dict[Source, bool] = {}
    for node in table.order:
        value = _value(table, node, fed, known)
        if value is not None:
            outputs = 2 if table.types[node] in PARTING else 1
            known.update((Source(node, index), value) for index in range(outputs))
    return known


def _value(table: NodeTable, node: int, fed: Mapping[str, bool], known: Mapping[Source, bool]) -> bool | None:
    op_type, read = table.types[node], table.inputs[node]
    if op_type == "Placeholder":
        return fed.get(table.names[node])
    if op_type == "Const":
        attr = table.nodes[node].attr
        is_predicate = attr["dtype"].type == tf.bool.as_datatype_enum
        held = tf.make_ndarray(attr["value"].tensor) if is_predicate else None
        return bool(held) if held is not None and held.ndim == 0 else None
    if op_type in PARTING:
        return known.get(read[0])
    if not read or any(source not in known for source in read):
        return None
    values = [known[source] for source in read]
    if op_type in PASSING:
        return values[0]
    return COMPUTED[op_type](*values) if op_type in COMPUTED else None


def fed_predicates(graph: Any, feeds: Mapping[str, Any]) -> dict[str, bool]:
    """Return the fed values that decide conditions of a graph of compat.v1.

    Args:
        graph: The graph.
        feeds: What is fed, by its name as a node reads it. An op of several outputs decides none.
    """
    values = {name: bool(value) for name, value in feeds.items() if ":" not in name and _is_predicate(value)}
    return {name: value for name, value in values.items() if _decides(graph.get_operation_by_name(name))}


def _is_predicate(value: Any) -> bool:
    is_bool = isinstance(value, bool) or getattr(value, "dtype", None) == np.bool_
    return is_bool and getattr(value, "shape", ()) == ()


def _decides(fed: Any) -> bool:
    """Tell whether what an op of a graph makes may part the branches of a condition."""
    if len(fed.outputs) != 1:
        return False
    seen: set[Any] = {fed}
    pending = [fed]
    while pending:
        for reader in _readers(pending.pop()) - seen:
            if reader.type in CONDITIONS or reader.type in CALLS:
                return True
            seen.add(reader)
            if reader.type in PASSING or reader.type in COMPUTED:
                pending.append(reader)
    return False


def _readers(op: Any) -> set[Any]:
    return {reader for output in op.outputs for reader in output.consumers()}
