"""Tell what is known of a graph without reading it.

That is where its step is, the most memory that it needs, and which ops exchange something outside of it.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from lms.device.kernels import Kernels
from lms.ir.assignments import ASSIGN, READ
from lms.ir.liveness import round_up
from lms.ir.op_traits import ANYTHING, CONSTANTS, is_backward, is_update, may_put, may_take
from lms.optimizer.grappler_item import Output
from lms.reader.called_functions import body_of, called_by, calls_functions, nodes_reached
from lms.reader.folded_constants import Folded, find_folded
from lms.reader.node_table import NodeTable
from lms.reader.op_facts import facts_of, size_of

BODY_ATTRS = {
    "PartitionedCall": ("f",),
    "StatefulPartitionedCall": ("f",),
    "If": ("then_branch", "else_branch"),
    "StatelessIf": ("then_branch", "else_branch"),
    "Case": ("branches",),
    "StatelessCase": ("branches",),
    "While": ("body",),
    "StatelessWhile": ("body",),
}
"""Where functions that are called and not taken in keep their bodies."""

DENSE = frozenset({ASSIGN, READ, "AssignAddVariableOp", "AssignSubVariableOp"})
"""Ops on a variable that go through all of it. With others TensorFlow copies what is read."""


@dataclass(frozen=True)
class Place:
    """A device: which nodes run there, and how much memory its kernels need."""

    holds: Callable[[str], bool]
    """Whether a node with this device name runs on the device."""
    kernels: Kernels
    device_type: str = "CPU"
    on_host: Callable[[Any, int], bool] = lambda node, index: False
    """Whether a node of the device leaves an output in host memory."""
    reads_on_host: Callable[[Any, int], bool] = lambda node, slot: False
    """Whether a node of the device reads an input in host memory."""
    body_peak: "Callable[[Place, Any, str, Sequence[Output]], int] | None" = None
    """The memory that a function needs which a node calls with such arguments."""

    def holds_each(self, table: NodeTable) -> list[bool]:
        """Tell of each node whether it runs on the device."""
        held = {device: self.holds(device) for device in {*table.devices}}
        return [held[device] for device in table.devices]


def step_frames(table: NodeTable, *, is_body: bool = False) -> list[int]:
    """Find the frames that hold a training step: gradients, and updates of variables if there are any.

    With ``is_body``, a frame with gradients alone is no step. Of frames within each other the outer one is
    the step: in it the loops of recurrent layers are one op each.
    """
    gradients = Counter(
        table.frame[node]
        for node, op_type in enumerate(table.types)
        if op_type not in CONSTANTS and is_backward(table.names[node], op_type)
    )
    updates = {table.frame[node] for node, op_type in enumerate(table.types) if is_update(op_type)}
    chosen: list[int] = []
    for frame in sorted(gradients.keys() & updates or (() if is_body else gradients)):
        if not any(table.is_within(frame, one) for one in chosen):
            chosen.append(frame)
    return chosen


def constant_bytes(table: NodeTable, outputs: Sequence[Sequence[Output]], place: Place) -> int:
    """Return the bytes of the device that a graph's constants take for good: their kernels hold them."""
    held = folded(table, outputs).held
    return sum(
        round_up(size_of(output) or 0)
        for node, is_here in enumerate(place.holds_each(table))
        if is_here and (table.types[node] in CONSTANTS or node in held)
        for output in outputs[node]
    )


def most_bytes(table: NodeTable, outputs: Sequence[Sequence[Output]], place: Place) -> int | None:
    """Return the bytes of all that a graph makes on a device: no order of its ops needs more.

    ``None`` where that is not known: a size is open, or ops run in a loop or in a function that is called.
    """
    if len(table.frames) > 1 or not BODY_ATTRS.keys().isdisjoint(table.types):
        return None
    here = place.holds_each(table)
    total = workspace = 0
    for node, made in enumerate(outputs):
        if not here[node] and not any(here[reader] for reader, _ in table.readers[node]):
            continue
        sizes = [size_of(output) for output in made]
        if here[node] and table.types[node] in place.kernels.types:
            facts = facts_of(table, outputs, node)
            workspace = max(workspace, place.kernels.workspace_bytes(facts))
            for extra in place.kernels.extra_outputs(facts):
                sizes += [extra.nbytes]
                if extra.output is not None:
                    sizes[extra.output] = sizes.pop()
        for nbytes in sizes:
            if nbytes is None:
                return None
            total += round_up(nbytes)
    return total + round_up(workspace)


def exchanging(table: NodeTable) -> frozenset[int]:
    """Find the ops that may wait for each other beside their inputs: one takes, another puts.

    What is taken may be what the same step puts, or what another thread makes of that. So what leads to a put
    must not wait for what follows a take. Where one of the two waits for the other anyway, nothing changes
    that. An op that calls functions takes and puts what they do, and anything where one of them is not known.
    """
    takes, puts = list[int](), list[int]()
    within: dict[tuple[str, ...], set[str]] = {}
    for node, op_type in enumerate(table.types):
        types = {op_type}
        if calls_functions(op_type):
            names = tuple(called_by(table.nodes[node]))
            if names not in within:
                reached = {one.op for one in nodes_reached([table.nodes[node]])}
                within[names] = reached if all(map(body_of, names)) else {ANYTHING}
            types |= within[names]
        takes += [node] * any(map(may_take, types))
        puts += [node] * any(map(may_put, types))
    found: set[int] = set()
    behind = {node: _behind(table, node) for node in (*takes, *puts)} if takes and puts else {}
    for take, put in product(takes, puts):
        if put not in behind[take] and take not in behind[put]:  # nor are they one
            found.update((take, put))
    return frozenset(found)


def _behind(table: NodeTable, start: int) -> set[int]:
    """Return a node, and all that wait for it."""
    found = {start}
    for node in table.order:
        if not found.isdisjoint(table.before[node]):
            found.add(node)
    return found


def folded(table: NodeTable, outputs: Sequence[Sequence[Output]]) -> Folded:
    """Find the nodes that TensorFlow computes once, when it prepares a graph."""
    return find_folded(table, lambda node: sum(size_of(output) or 0 for output in outputs[node]))


def in_place_assignments(
    table: NodeTable, outputs: Sequence[Sequence[Output]], place: Place
) -> frozenset[int]:
    """Return the nodes of the assignments that may copy the value into the variable's own memory.

    What the step reads of the variable has the value's type and shape, and only dense ops use it.

    Args:
        table: The graph.
        outputs: Type and shape of the outputs of each node.
        place: The device whose memory is planned.
    """
    found: list[int] = []
    for node, op_type in enumerate(table.types):
        if op_type != ASSIGN or not place.holds(table.devices[node]) or len(table.inputs[node]) != 2:
            continue
        handle, value = table.inputs[node]
        new = outputs[value.node][value.index : value.index + 1]
        users = {user for user, _ in table.readers[handle.node]}
        read = [outputs[user] for user in users if table.types[user] == READ]
        is_plain = users.isdisjoint(table.marks) and DENSE.issuperset(table.types[user] for user in users)
        is_here = (
            bool(new) and bool(size_of(new[0])) and not place.on_host(table.nodes[value.node], value.index)
        )
        if is_plain and is_here and read and all(list(one) == list(new) for one in read):
            found.append(node)
    return frozenset(found)
