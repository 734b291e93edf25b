"""Edit the branches of conditions: let others wait for their ops, and hold back what these make early.

What waits for a node that its condition leaves out is left out, too. Only a ``Merge`` runs all the same: it
needs one of its inputs, and those that it waits for may have been left out. So others wait for a ``Merge``
that waits for the node, and reads a constant.

Where the predicate is known from the beginning, as with ``gradient_accumulation_steps``, ops that need no
gradient (a momentum times its factor) may run beside the forward pass, and what they make is held until the
gradient comes that it is added to. So the ``Switch`` that lets the variable into the branch waits for the op
that makes this gradient. What needs both comes no later.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from lms.ir.op_traits import EXIT, is_backward
from lms.optimizer.grappler_item import Output
from lms.reader.conditions import Conditions, find_conditions
from lms.reader.node_table import SWITCHES, NodeTable, inverted
from lms.reader.op_facts import size_of

NEVER = -1
"""The place of a gradient that a node does not need."""

NUMBER = Output(tf.int32.as_datatype_enum, ())
"""What nodes make that run in any case: on a GPU, too, ops of this type have their results in host memory."""


class Exits:
    """Writes nodes to wait for in place of those that a condition may leave out.

    Args:
        table: The graph.
        conditions: Those of its nodes.
        add: Adds a node with a name and a purpose to the graph.
    """

    def __init__(self, table: NodeTable, conditions: Conditions, add: Callable[[str, str], Any]) -> None:
        self._table, self._conditions, self._add = table, conditions, add
        self._constants: dict[tuple[int, str], str] = {}

    def write(self, name: str, nodes: Sequence[int]) -> dict[str, list[Output]]:
        """Add a node that runs when each of ``nodes`` has run, or is left out by a predicate of the step.

        Return type and shape of what the new nodes make, by their names.
        """
        table = self._table
        device = table.nodes[nodes[0]].device
        predicates = [one for node in nodes if (one := self._conditions.predicate(node)) is not None]
        made = {name: [NUMBER, NUMBER]}
        of = min(predicates).node, device
        if of not in self._constants:
            constant = f"{name}/runs"
            self._constants[of] = constant
            made[constant] = [NUMBER]
            node = self._add(constant, EXIT)
            node.op, node.device = "Const", device
            node.input.append(f"^{table.names[of[0]]}")
            node.attr["dtype"].type = NUMBER.dtype
            node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(0, tf.int32))
        node = self._add(name, EXIT)
        node.op, node.device = "Merge", device
        node.input.extend([self._constants[of], *(f"^{table.names[one]}" for one in nodes)])
        node.attr["T"].type = NUMBER.dtype
        node.attr["N"].i = 1
        return made


def hold_back(
    table: NodeTable, outputs: Sequence[Sequence[Output]], frame: int, min_bytes: int
) -> tuple[NodeTable, int]:
    """Add control inputs to the switches of a frame; return the new table, and how many bytes come later.

    Args:
        table: The graph; its NodeDefs are changed.
        outputs: Type and shape of the outputs of each node.
        frame: The frame that is planned.
        min_bytes: Smaller tensors may be made at any time.
    """
    waits = list(_waits(table, outputs, frame, min_bytes))
    held = sum(nbytes for _, _, nbytes in waits)
    return table.add_waits([(switch, gradient) for switch, gradient, _ in waits]), held


def _waits(
    table: NodeTable, outputs: Sequence[Sequence[Output]], frame: int, min_bytes: int
) -> Iterator[tuple[int, int, int]]:
    """Yield switches, each with the node that it is to wait for, and bytes that come early without that."""
    if SWITCHES.isdisjoint(table.types):
        return
    conditions, nodes = find_conditions(table, frame), range(len(table.nodes))
    here = [table.frame[node] == frame for node in nodes]
    always = [here[node] and conditions.of_node[node] == conditions.step for node in nodes]
    under = [here[node] and conditions.of_node[node] > conditions.step for node in nodes]
    comes = _gradients_come(table, always)
    after = inverted(table.before)
    start, early = list(comes), [0] * len(nodes)
    for node in reversed(table.order):
        if under[node] and comes[node] == NEVER:
            start[node] = min((start[one] for one in after[node]), default=NEVER)
            made = sum(size_of(one) or 0 for one in outputs[node])
            early[node] = (made if made >= min_bytes else 0) + max(
                (early[one] for one in after[node]), default=0
            )
    for node in nodes:
        if always[node] and table.types[node] in SWITCHES:
            gate = min((start[one] for one in after[node]), default=NEVER)
            if gate > comes[node] and (nbytes := sum(early[one] for one in after[node])):
                yield node, table.order[gate], nbytes


def _gradients_come(table: NodeTable, always: Sequence[bool]) -> list[int]:
    """Return for each node the place in the order of the last gradient it needs, made without a condition."""
    comes, place, behind = [NEVER] * len(always), [NEVER] * len(always), [False] * len(always)
    for index, node in enumerate(table.order):
        before = table.before[node]
        is_backward_op = is_backward(table.names[node], table.types[node])
        behind[node] = is_backward_op or any(behind[one] for one in before)
        comes[node] = max((max(comes[one], place[one]) for one in before), default=NEVER)
        if behind[node] and always[node] and table.types[node] not in SWITCHES:
            place[node] = index
    return comes
