"""Find the units of a frame, each of which is one op: a node, two that one kernel computes, or a loop."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from lms.device.kernels import Kernels
from lms.errors import UnreadableError
from lms.reader.node_table import EXITS, ROOT, NodeTable, topological_order


@dataclass
class Units:
    """The units of a frame, known by the number of their first node."""

    table: NodeTable
    of_node: dict[int, int] = field(default_factory=dict)
    """The unit of each node of the frame."""
    members: dict[int, list[int]] = field(default_factory=dict)
    loops: dict[int, int] = field(default_factory=dict)
    """The frame of each unit that is a loop."""
    unordered: set[int] = field(default_factory=set)
    """Units that may get no control edge."""
    vanishing: set[int] = field(default_factory=set)
    """Nodes whose outputs never come into being."""

    @classmethod
    def of(cls, table: NodeTable, frame: int, kernels: Kernels) -> "Units":
        """Find the units of ``frame``; ``kernels`` are those of the device that is planned."""
        units = cls(table)
        tops: dict[int, int] = {}
        for node, (op_type, inner) in enumerate(zip(table.types, table.frame, strict=True)):
            if op_type in EXITS and inner == frame:
                inner = table.frame[table.inputs[node][0].node]
            if inner == frame:
                units.of_node[node] = node
                units.members[node] = [node]
            elif inner != ROOT and table.is_within(inner, frame):
                while table.frames[inner].parent != frame:
                    inner = table.frames[inner].parent or ROOT
                unit = tops.setdefault(inner, node)
                units.of_node[node] = unit
                units.members.setdefault(unit, []).append(node)
                units.loops[unit] = inner
        for pair in kernels.pairs(table):
            first, second = pair.first, pair.second
            if units.of_node.get(first) == first and units.of_node.get(second) == second:
                units.of_node[second] = first
                units.members[first].append(second)
                del units.members[second]
                units.unordered |= {first} if pair.bare else set()
                units.vanishing |= {second} if pair.vanishes else set()
        return units

    def before(self, unit: int) -> set[int]:
        """Return the units that ``unit`` waits for."""
        nodes = set().union(*(self.table.before[node] for node in self.members[unit]))
        return {self.of_node[node] for node in nodes if node in self.of_node} - {unit}

    def order(self, last: Collection[int] = ()) -> Iterator[int]:
        """Yield the units, each after those that it waits for; ``last`` only where no other may come next.

        Raises:
            UnreadableError: If there is no such order.
        """
        if len(self.members) == len(self.table.nodes):  # each node is one
            yield from topological_order(self.table.before, last) if last else self.table.order
            return
        units = sorted(self.members)
        place = {unit: number for number, unit in enumerate(units)}
        before = [[place[one] for one in self.before(unit)] for unit in units]
        order = topological_order(before, {place[unit] for unit in last})
        if len(order) < len(units):
            raise UnreadableError(
                "a loop, or two ops that one kernel computes, would wait for its own result"
            )
        for number in order:
            yield units[number]
