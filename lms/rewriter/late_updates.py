"""Have each update of a variable wait for the ops that still read the old value.

An op that updates a variable in place makes a copy of the value first, if anybody else still holds it
(``PrepareToUpdateVariable`` in ``resource_variable_ops.cc``). The gradient with respect to a layer's input
reads the weights, and whether it has run when they are updated is chance. With a copy the variable lies
elsewhere afterwards, in the midst of what is free between steps: then free memory is in other pieces in each
step. Without one every variable stays where it is, and the gradient waits in place of the copy.

All edges go forward in one order of the frame's units (nodes, loops, ops that become one kernel), in which
updates come as late as they can. So they make no cycle, also where a step updates a variable twice, or reads
one again behind its update. An update waits for nothing that may block or fail where it did not before: a
queue, a batch, other ranks, Python code.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache

from tensorflow.python.framework import op_def_registry

from lms.ir.assignments import READ
from lms.ir.liveness import SMALL_BYTES
from lms.ir.op_traits import (
    ALIAS_TYPES,
    OUTSIDE_TYPES,
    is_collective,
    is_update,
    may_end_step,
    may_put,
    may_take,
)
from lms.optimizer.grappler_item import Output
from lms.reader.conditions import Conditions, find_conditions
from lms.reader.node_table import NodeTable
from lms.reader.op_facts import size_of
from lms.reader.step_reader import RESULTS
from lms.reader.survey import Place
from lms.reader.units import Units

Links = Mapping[int, Collection[int]]
"""By unit the units before it, or behind it."""

SPARSE = ("ResourceScatter", "ResourceSparseApply", "Scatter", "SparseApply")
"""Beginnings of the types of updates that write a part of a variable. From the first one on each read copies
the variable (``copy_on_read_mode`` in ``resource_var.h``), so no update has to."""


def delay_updates(
    table: NodeTable, outputs: Sequence[Sequence[Output]], place: Place, frame: int
) -> tuple[NodeTable, int]:
    """Add control inputs to the updates of a frame's variables.

    Args:
        table: The graph; its NodeDefs are changed.
        outputs: Type and shape of the outputs of each node.
        place: The device that is planned.
        frame: The frame that is planned.

    Returns:
        The new table, and the bytes of the variables of which no copy is made any more.
    """
    waits, nbytes = [], 0
    for update, readers, variables in _waits(table, outputs, place, frame):
        waits += [(update, reader) for reader in readers]
        nbytes += variables
    return table.add_waits(waits), nbytes


def _waits(
    table: NodeTable, outputs: Sequence[Sequence[Output]], place: Place, frame: int
) -> Iterator[tuple[int, list[int], int]]:
    """Yield updates with the ops that each is to wait for, and with the bytes of its variables.

    Where an op cannot be waited for, the copy is made in any case, and the update waits for no other either.
    """
    here = [held and table.frame[node] == frame for node, held in enumerate(place.holds_each(table))]
    updates = list(_updates(table, outputs, here))
    if not updates:
        return
    units = Units.of(table, frame, place.kernels)
    order = list(units.order(last={update for update, _, _ in updates}))
    before = {unit: units.before(unit) for unit in order}
    after = _after(before)
    position = {unit: number for number, unit in enumerate(order)}
    reached = _gathered(reversed(order), after, {one[0]: 1 << bit for bit, one in enumerate(updates)})
    held_up = _gathered(order, before, _blocking(table, units))
    conditions = find_conditions(table, frame)
    for bit, (update, readers, nbytes) in enumerate(updates):
        open_readers = []
        for reader in readers:
            unit = units.of_node.get(reader)
            if unit is not None and reached[unit] >> bit & 1:
                continue
            alone = unit == reader and len(units.members[unit]) == 1 and here[reader]
            if not alone or position[reader] > position[update] or held_up[reader] & ~held_up[update]:
                break
            if not _may_wait(table, conditions, update, reader):
                break
            open_readers.append(reader)
        else:
            if open_readers:
                yield update, open_readers, nbytes


def _may_wait(table: NodeTable, conditions: Conditions, update: int, reader: int) -> bool:
    return (
        table.types[reader] not in RESULTS  # the caller holds the value, and what waits for it is unordered
        and table.devices[update] == table.devices[reader]
        and conditions.runs_with(reader, update)
        and conditions.may_be_ordered(update)
        and conditions.may_be_ordered(reader)
    )


def _updates(
    table: NodeTable, outputs: Sequence[Sequence[Output]], here: Sequence[bool]
) -> Iterator[tuple[int, list[int], int]]:
    """Yield each update of larger variables, the ops that read a value of these, and their bytes."""
    reads: dict[int, list[int]] = {}
    for node, op_type in enumerate(table.types):
        if op_type == READ and outputs[node] and (size_of(outputs[node][0]) or 0) > SMALL_BYTES:
            reads.setdefault(table.handle(table.inputs[node][0].node), []).append(node)
    for node, op_type in enumerate(table.types):
        if reads and here[node] and is_update(op_type) and not op_type.startswith(SPARSE):
            handles = {table.handle(source.node) for source in table.inputs[node]} & reads.keys()
            readers = {
                reader for handle in handles for read in reads[handle] for reader in _readers(table, read)
            }
            nbytes = sum(size_of(outputs[reads[handle][0]][0]) or 0 for handle in handles)
            if readers := readers - {node}:
                yield node, sorted(readers), nbytes


def _readers(table: NodeTable, read: int) -> Iterator[int]:
    """Yield the nodes that read a value, also through nodes that hand it on as it is."""
    found, open_nodes = {read}, [read]
    while open_nodes:
        for reader in {node for node, _ in table.readers[open_nodes.pop()]} - found:
            found.add(reader)
            if table.types[reader] in ALIAS_TYPES:
                open_nodes.append(reader)
            else:
                yield reader


def _after(before: Links) -> Links:
    """Return the units that wait for each unit."""
    after: dict[int, list[int]] = {unit: [] for unit in before}
    for unit, earlier in before.items():
        for one in earlier:
            after[one].append(unit)
    return after


def _gathered(order: Iterable[int], links: Links, own: Mapping[int, int]) -> dict[int, int]:
    """Return by unit as bits what it has itself, and what those have that it is linked to."""
    found: dict[int, int] = {}
    for unit in order:
        bits = own.get(unit, 0)
        for one in links[unit]:
            bits |= found[one]
        found[unit] = bits
    return found


def _blocking(table: NodeTable, units: Units) -> dict[int, int]:
    """Return the units that may wait for others or end the step, each as a bit of its own."""
    blocking = [
        unit for unit, nodes in units.members.items() if any(_may_block(table.types[n]) for n in nodes)
    ]
    return {unit: 1 << number for number, unit in enumerate(blocking)}


@cache
def _may_block(op_type: str) -> bool:
    """Tell whether an op may wait for something that its inputs do not show, or end the step."""
    if op_type == READ or op_type in OUTSIDE_TYPES or is_update(op_type):
        return False
    if is_collective(op_type) or may_end_step(op_type) or may_take(op_type) or may_put(op_type):
        return True
    definition = op_def_registry.get(op_type)
    return definition is None or definition.is_stateful
