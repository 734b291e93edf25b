"""When the variables of a step are read, and which assignments can write into the memory that one has.

``AssignVariableOp`` makes the new value's buffer the variable's and frees the old one. So each step leaves a
momentum of SGD elsewhere, and after a few steps variables lie all over the device, with free memory in pieces
between them. In an edited step ``LmsAssign`` (``ops/assign.cc``) copies the value into the old buffer, where
nobody else holds that, and every variable stays where it is.
"""

from collections.abc import Sequence
from functools import cached_property

from lms.ir.graph import Op
from lms.ir.liveness import SMALL_BYTES, Buffers, positions
from lms.ir.op_traits import SUM

ASSIGN, READ = "AssignVariableOp", "ReadVariableOp"


class VariableReads:
    """When a step reads its variables.

    Args:
        buffers: The step's.
        begins: For each op the point at which it begins.
        ends: The point at which each op ends; the default is where it begins.
        last_point: A point behind all of them; the default is that of an order.
    """

    def __init__(
        self,
        buffers: Buffers,
        begins: Sequence[int],
        ends: Sequence[int] | None = None,
        last_point: int | None = None,
    ) -> None:
        self._buffers, self._begins, roots = buffers, begins, buffers.graph.roots
        ends = begins if ends is None else ends
        end = 2 * len(begins) if last_point is None else last_point
        self._reads: dict[int, list[tuple[int, int]]] = {}
        """By the tensor of a variable's handle the points of each read and of its last use."""
        self._shared: set[int] = set()
        """Variables whose buffer an assignment makes another variable's, too."""
        given = {roots[op.inputs[1]] for op in buffers.with_variables if op.type == ASSIGN}
        for op in buffers.with_variables:
            if op.type == READ:
                root, variable = roots[op.outputs[0]], self.variable(op)
                last = max((ends[user] for user in buffers.users[root]), default=0)
                last = end if buffers.kept[root] else last
                self._reads.setdefault(variable, []).append((begins[op.id], last))
                if root in given:
                    self._shared.add(variable)

    def variable(self, op: Op) -> int:
        """Return the tensor of the handle of the variable that an op is on."""
        return self._buffers.graph.roots[op.inputs[0]]

    def last(self, variable: int, point: int) -> int | None:
        """Return when the value of before ``point`` is used for the last time; ``None``: it is not read."""
        return max((last for first, last in self._reads.get(variable, ()) if first < point), default=None)

    @cached_property
    def may_stay(self) -> frozenset[int]:
        """The assignments that find memory of their variable's which nobody else holds.

        The memory must be there, which a read before shows. What the step gives two variables TensorFlow lets
        both have. A sum begins with a term that nothing else holds, and its last digits depend on which that
        is: a term that is also assigned stays held by its variable, as without LMS.
        """
        return frozenset(
            op.id for op in self._buffers.with_variables if op.assigns_in_place and self._may(op)
        )

    def _may(self, op: Op) -> bool:
        graph, point, variable = self._buffers.graph, self._begins[op.id], self.variable(op)
        root = graph.roots[op.inputs[1]]
        if graph.ops[graph.tensors[root].op].type == READ or variable in self._shared:
            return False
        if any(graph.ops[user].type == SUM for user in self._buffers.users[root]):
            return False
        last = self.last(variable, point)
        return last is not None and last <= point


def in_place(buffers: Buffers, order: Sequence[int]) -> frozenset[int]:
    """Return the assignments that an edited step has write into their variables' memory.

    Where only small variables are assigned to, they move. They take apart little memory, and a plan that fits
    while they move fits the threads of a run: of ResNet-152 one that did not ran out of memory.

    Args:
        buffers: The step's.
        order: That of the plan.
    """
    return buffers.once((VariableReads, tuple(order)), lambda: _in_place(buffers, order))


def _in_place(buffers: Buffers, order: Sequence[int]) -> frozenset[int]:
    found = VariableReads(buffers, [2 * place for place in positions(order)]).may_stay
    graph = buffers.graph
    sizes = (buffers.nbytes[graph.roots[graph.ops[op].inputs[1]]] for op in found)
    return found if any(nbytes > SMALL_BYTES for nbytes in sizes) else frozenset()
