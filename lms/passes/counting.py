"""The pass that counts what lies on the device before the step."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from lms.device.horovod_fusion_buffer import FusionBuffer
from lms.device.memory_pool import Rooms
from lms.passes.parsing import arguments_of
from lms.passes.work import Residents, Work
from lms.reader.node_table import ENTERS, NodeTable
from lms.reader.survey import constant_bytes
from lms.variables.memory import give_own_memory
from lms.variables.on_host import HostVariables

ONLY_READ = frozenset({"LmsGetHostValue", "ReadVariableOp"})


class Counting:
    """Counts the bytes on the device before the step, and gives each variable memory of its own."""

    name = "residents"

    def __init__(self, fusion: FusionBuffer, host: HostVariables, rooms: Rooms) -> None:
        self._fusion, self._host, self._rooms = fusion, host, rooms

    def requires(self, work: Work) -> bool:
        """Tell whether the shapes are known, and which variables stream; nothing is counted twice."""
        if work.frame is None:
            return bool(work.outputs) and not self._host.is_on
        return bool(work.outputs) and (self._host.is_on or work.residents == Residents())

    def apply(self, work: Work) -> Work:
        """Add the bytes that lie on the device when the step begins."""
        assert work.table is not None  # noqa: S101 - Parsing went before
        inputs = work.task.inputs
        if self._host.is_on:
            streamed = set(arguments_of(work.table, work.streamed.handles))
            self._host.settle(inputs, streamed, work.place.holds)
        pending = give_own_memory(inputs, set(_changed_arguments(work.table)), self._host.has_room)
        if not inputs:
            pending += self._host.bring_back(work.place.holds)
            changed = {work.table.names[node] for node in _changed_handles(work.table, work.place.holds)}
            pending += (nbytes for name, nbytes in work.task.shared.items() if name in changed)
        in_use, _ = work.device.memory() or (0, 0)
        in_use = max(0, in_use - self._rooms.kept_bytes(work.device.name))  # a plan counts its rooms itself
        exchanges = zip(work.table.types, map(len, work.table.inputs), strict=True)
        residents = Residents(
            in_use,
            tuple(pending),
            constant_bytes(work.table, work.outputs, work.place),
            self._fusion.pending_bytes(exchanges, work.device.type, in_use),
        )
        return replace(work, residents=residents)


def _changed_arguments(table: NodeTable) -> Iterator[int]:
    """Yield the numbers of the arguments that a graph does more with than read them."""
    for node, op_type in enumerate(table.types):
        if op_type == "_Arg" and not ONLY_READ.issuperset(_uses(table, node)):
            yield table.nodes[node].attr["index"].i


def _changed_handles(table: NodeTable, is_planned: Callable[[str], bool]) -> Iterator[int]:
    """Yield the nodes of a device's variables that a session's graph does more with than read them."""
    for node, op_type in enumerate(table.types):
        if op_type == "VarHandleOp" and is_planned(table.nodes[node].device):
            if not ONLY_READ.issuperset(_uses(table, node)):
                yield node


def _uses(table: NodeTable, node: int) -> Iterator[str]:
    """Yield the types of the ops that read a node, also inside of loops."""
    for reader, _ in table.readers[node]:
        if table.types[reader] in ENTERS:
            yield from _uses(table, reader)
        else:
            yield table.types[reader]
