"""Find the ops that read constants alone, which TensorFlow computes once, when it prepares a graph.

It folds constants for the last time behind the plug-in, and nothing that a plan has an op wait for keeps it
from that. What the step reads of the results is then held by a kernel: on the device before the step begins,
and after it. The loss of a step often has some tensors of the size of its logits there.

Source: ``constant_folding.cc`` in TensorFlow's ``core/common_runtime``.
"""

from collections.abc import Callable
from dataclasses import dataclass

from tensorflow.python.framework import op_def_registry

from lms.ir.op_traits import CONSTANTS, FOLDED_BYTES, MERGES
from lms.reader.node_table import ENTERS, EXITS, SWITCHES, TURNS, NodeTable

CONTROL_FLOW = ENTERS | EXITS | MERGES | SWITCHES | TURNS


@dataclass(frozen=True)
class Folded:
    """The nodes that no longer run in the step, without the constants of the graph as it is written."""

    nodes: frozenset[int]
    held: frozenset[int]
    """Those whose results the step reads. The others vanish."""


def find_folded(table: NodeTable, nbytes: Callable[[int], int]) -> Folded:
    """Find the nodes that TensorFlow folds into constants.

    Args:
        table: The graph.
        nbytes: The bytes that a node makes.
    """
    constant = {node for node, op_type in enumerate(table.types) if op_type in CONSTANTS}
    ordered: list[int] = []
    pending = list(constant)
    while pending:
        for reader, _ in table.readers[pending.pop()]:
            if reader not in constant and _is_constant(table, reader, constant):
                constant.add(reader)
                ordered.append(reader)
                pending.append(reader)
    running: set[int] = set()
    held: set[int] = set()
    for node in reversed(ordered):
        readers = {reader for reader, _ in table.readers[node]}
        if readers <= constant:
            running |= {node} if readers & running else set()
        elif nbytes(node) > FOLDED_BYTES:
            running.add(node)
        else:
            held.add(node)
    return Folded(frozenset(ordered) - running, frozenset(held))


def _is_constant(table: NodeTable, node: int, constant: set[int]) -> bool:
    """Tell whether a node reads constants alone, on its own device, and has no other effect."""
    read = {source.node for source in table.inputs[node]}
    if not read <= constant or table.types[node] in CONTROL_FLOW:
        return False
    device = table.nodes[node].device
    definition = op_def_registry.get(table.types[node])
    is_pure = definition is not None and not definition.is_stateful
    return is_pure and all(table.nodes[one].device == device for one in read)
