"""When the variables of a step are read, and which assignments can write into the memory that one has.

``AssignVariableOp`` makes the new value's buffer the variable's and frees the old one. So each step leaves a
momentum of SGD elsewhere, and after a few steps variables lie all over the device, with free memory in pieces
between them. In an edited step ``LmsAssign`` (``ops/assign.cc``) copies the value into the old buffer, where
nobody else holds that, and every variable stays where it is.
"""

from collections.abc import Sequence
from functools import cached_property

from lms.ir.graph import Op
from lms.ir.liveness import SMALL_BYTES, Buffers
from lms.ir.op_traits import SUM

ASSIGN, READ = "AssignVariableOp", "ReadVariableOp"


class VariableReads:
    """When a step reads its variables.

    Args:
        buffers: The step's.
        position: For each op its place in the order; what is at place ``p`` runs at point ``2 * p``.
    """

    def __init__(self, buffers: Buffers, position: Sequence[int]) -> None:
        self._buffers, self._position = buffers, position
        self._reads: dict[int, list[tuple[int, int]]] = {}
        """By the tensor of a variable's handle the points of each read and of its last use."""
        for op in buffers.with_variables:
            if op.type == READ:
                root = buffers.graph.roots[op.outputs[0]]
                last = max((2 * position[user] for user in buffers.users[root]), default=0)
                last = 2 * len(position) if buffers.kept[root] else last
                self._reads.setdefault(self.variable(op), []).append((2 * position[op.id], last))

    def variable(self, op: Op) -> int:
        """Return the tensor of the handle of the variable that an op is on."""
        return self._buffers.graph.roots[op.inputs[0]]

    def last(self, variable: int, point: int) -> int | None:
        """Return when the value of before ``point`` is used for the last time; ``None``: it is not read."""
        return max((last for first, last in self._reads.get(variable, ()) if first < point), default=None)

    @cached_property
    def in_place(self) -> frozenset[int]:
        """The assignments that write into their variables' memory, once the step is edited.

        The memory must be there, which a read before shows, and nobody may hold it any more. Not where the
        value is another variable's, which TensorFlow lets both have. Nor where it is a term of a sum, which
        begins with a term that nothing else holds: then the variable holds it, as in a step without an edit.

        Where only small variables are assigned to, they move. They take apart little memory, and a plan that
        fits while they move fits the threads of a run: of ResNet-152 one that did not ran out of memory.
        """
        nbytes, roots = self._buffers.nbytes, self._buffers.graph.roots
        found = [op for op in self._buffers.with_variables if op.assigns_in_place and self._may(op)]
        is_worth_it = any(nbytes[roots[op.inputs[1]]] > SMALL_BYTES for op in found)
        return frozenset(op.id for op in found) if is_worth_it else frozenset()

    def _may(self, op: Op) -> bool:
        graph, point = self._buffers.graph, 2 * self._position[op.id]
        root = graph.roots[op.inputs[1]]
        if graph.ops[graph.tensors[root].op].type == READ:
            return False
        if any(graph.ops[user].type == SUM for user in self._buffers.users[root]):
            return False
        last = self.last(self.variable(op), point)
        return last is not None and last <= point
