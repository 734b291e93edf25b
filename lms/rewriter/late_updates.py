"""Have each update of a variable wait for the ops that still read the value of before.

An op that updates a variable in place makes a copy of the value first, if anybody else still holds it
(``PrepareToUpdateVariable`` in ``resource_variable_ops.cc``). The gradient with respect to a layer's input
reads the weights, and whether it has run when they are updated is chance. With a copy the variable lies
elsewhere afterwards, in the midst of what is free between steps: then free memory is in other pieces in each
step. Without one every variable stays where it is, and the gradient waits in place of the copy.

All edges go forward in one order of the nodes, in which updates come as late as they can. So they make no
cycle, also where a step updates a variable twice, or reads one again behind its update.
"""

from collections.abc import Callable, Iterator, Sequence
from heapq import heapify, heappop, heappush

from lms.ir.liveness import SMALL_BYTES
from lms.ir.op_traits import ALIAS_TYPES, is_collective, is_update, may_end_step
from lms.optimizer.grappler_item import Output
from lms.reader.conditions import Conditions, find_conditions
from lms.reader.node_table import NodeTable
from lms.reader.op_facts import size_of
from lms.reader.step_reader import RESULTS
from lms.reader.survey import Place

READ = "ReadVariableOp"


def delay_updates(
    table: NodeTable, outputs: Sequence[Sequence[Output]], place: Place, frame: int
) -> NodeTable:
    """Add control inputs to the updates of a frame's variables, and return the new table.

    Args:
        table: The graph; its NodeDefs are changed.
        outputs: Type and shape of the outputs of each node.
        place: The device that is planned.
        frame: The frame that is planned.
    """
    return table.with_waits(_waits(table, outputs, place, frame))


def _waits(
    table: NodeTable, outputs: Sequence[Sequence[Output]], place: Place, frame: int
) -> Iterator[tuple[int, int]]:
    """Yield updates, each with an op that it is to wait for."""
    here = place.holds_each(table)
    uses = list(
        _uses(table, outputs, [here[node] and table.frame[node] == frame for node in range(len(here))])
    )
    if not uses:
        return
    after = _after(table)
    position = _late(table, after, {update for update, _ in uses})
    reached = _reached(table, after, [update for update, _ in uses])
    behind_batch = _behind(table, may_end_step)
    behind_others = _behind(table, is_collective)
    merged = {node for pair in place.kernels.pairs(table) for node in (pair.first, pair.second)}
    conditions = find_conditions(table, frame)
    for number, (update, readers) in enumerate(uses):
        for reader in readers:
            if position[reader] > position[update] or reached[reader] >> number & 1:
                continue
            if reader in merged or behind_others[reader] or behind_batch[reader] > behind_batch[update]:
                continue
            if _may_wait(table, conditions, update, reader):
                yield update, reader


def _may_wait(table: NodeTable, conditions: Conditions, update: int, reader: int) -> bool:
    return (
        table.types[reader] not in RESULTS  # the caller holds the value, and what waits for it is unordered
        and table.devices[update] == table.devices[reader]
        and conditions.runs_with(reader, update)
        and conditions.may_be_ordered(update)
        and conditions.may_be_ordered(reader)
    )


def _uses(
    table: NodeTable, outputs: Sequence[Sequence[Output]], here: Sequence[bool]
) -> Iterator[tuple[int, list[int]]]:
    """Yield each update of a frame's larger variables, and the ops that read a value of its variables."""
    reads: dict[int, list[int]] = {}
    for node, op_type in enumerate(table.types):
        if op_type == READ and here[node] and outputs[node]:
            if (size_of(outputs[node][0]) or 0) > SMALL_BYTES:
                reads.setdefault(table.handle(table.inputs[node][0].node), []).append(node)
    for node, op_type in enumerate(table.types):
        if reads and here[node] and is_update(op_type):
            handles = {table.handle(source.node) for source in table.inputs[node]} & reads.keys()
            readers = {
                reader for handle in handles for read in reads[handle] for reader in _readers(table, read)
            }
            if readers := {reader for reader in readers if here[reader] and reader != node}:
                yield node, sorted(readers)


def _readers(table: NodeTable, read: int) -> Iterator[int]:
    """Yield the nodes that read a value, also through nodes that only show it."""
    found, open_nodes = {read}, [read]
    while open_nodes:
        for reader in {node for node, _ in table.readers[open_nodes.pop()]} - found:
            found.add(reader)
            if table.types[reader] in ALIAS_TYPES:
                open_nodes.append(reader)
            else:
                yield reader


def _after(table: NodeTable) -> list[list[int]]:
    after: list[list[int]] = [[] for _ in table.nodes]
    for node, before in enumerate(table.before):
        for other in before:
            after[other].append(node)
    return after


def _late(table: NodeTable, after: Sequence[Sequence[int]], updates: set[int]) -> list[int]:
    """Return the place of each node in an order in which updates come only when nothing else can."""
    waiting = [len(before) for before in table.before]
    ready = [(node in updates, node) for node, count in enumerate(waiting) if not count]
    heapify(ready)
    position, place = [0] * len(waiting), 0
    while ready:
        _, node = heappop(ready)
        position[node] = place
        place += 1
        for later in after[node]:
            waiting[later] -= 1
            if not waiting[later]:
                heappush(ready, (later in updates, later))
    return position


def _reached(table: NodeTable, after: Sequence[Sequence[int]], updates: Sequence[int]) -> list[int]:
    """Return by node as bits the numbers of the updates that wait for it already."""
    own = {update: 1 << number for number, update in enumerate(updates)}
    reached = [0] * len(after)
    for node in reversed(table.order):
        bits = own.get(node, 0)
        for later in after[node]:
            bits |= reached[later]
        reached[node] = bits
    return reached


def _behind(table: NodeTable, holds: Callable[[str], bool]) -> list[bool]:
    """Tell of each node whether it waits for one of such a type, or is one."""
    behind = [False] * len(table.nodes)
    for node in table.order:
        behind[node] = holds(table.types[node]) or any(map(behind.__getitem__, table.before[node]))
    return behind
