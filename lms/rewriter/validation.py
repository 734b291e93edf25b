"""Check an edited graph before TensorFlow gets it.

TensorFlow answers a graph that it cannot build with one line in its log, and runs the step without any of its
optimizations: without swaps, and to other bits. So what it would refuse is found here.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from tensorflow.python.framework import op_def_registry

from lms.device.kernels import Kernels
from lms.optimizer.grappler_item import Output
from lms.reader.node_table import MERGES, TURNS, NodeTable, Source
from lms.rewriter.writer import RewriteError


def validate(
    graph_def: Any,
    table: NodeTable,
    outputs: Sequence[Sequence[Output]],
    added: Collection[str],
    kernels: Kernels,
) -> None:
    """Check that an edited graph can be built and run, and runs the kernels that it would run unedited.

    Args:
        graph_def: The edited graph.
        table: The graph as it was read.
        outputs: Type and shape of the outputs of each node of ``table``.
        added: The names of the added nodes.
        kernels: Those of the device.

    Raises:
        RewriteError: If two nodes have one name; if an added node lacks a device, a known type or an
            attribute; if a node reads what is not there, of another type or of another number than it takes;
            if nodes wait for each other; or if TensorFlow would merge other nodes than before.
    """
    nodes = list(graph_def.node)
    number = {node.name: place for place, node in enumerate(nodes)}
    if len(number) < len(nodes):
        raise RewriteError("two nodes of the edited graph have one name")
    signatures = {name: _signature(nodes[number[name]]) for name in added}
    types = _Types(table, outputs, signatures)
    before: list[set[int]] = []
    reads: list[tuple[Source, ...]] = []
    waits: list[tuple[int, ...]] = []
    for place, node in enumerate(nodes):
        needed: set[int] = set()
        read: list[Source] = []
        controls: list[int] = []
        old = table.inputs[place] if place < len(table.nodes) else None
        wanted = (
            signatures[node.name].inputs
            if old is None
            else [outputs[source.node][source.index].dtype for source in old]
        )
        for slot, text in enumerate(node.input):
            name, _, index = text.removeprefix("^").partition(":")
            maker = number.get(name)
            if maker is None:
                raise RewriteError(f"{node.name} reads {text}, which is not there")
            if text[0] == "^":
                controls.append(maker)
            elif controls:
                raise RewriteError(f"{node.name} reads {text} behind a control input")
            else:
                made = types.of(name, int(index or 0))
                if made is None:
                    raise RewriteError(f"{node.name} reads {text}, an output that is not there")
                if slot < len(wanted) and made != wanted[slot]:
                    raise RewriteError(f"{node.name} reads {text}, which is of another type than it takes")
                read.append(Source(maker, int(index or 0)))
            if not (node.op in MERGES and nodes[maker].op in TURNS):
                needed.add(maker)
        if len(read) != len(wanted):
            raise RewriteError(f"{node.name} reads {len(read)} tensors; needed {len(wanted)}")
        before.append(needed)
        reads.append(tuple(read))
        waits.append(tuple(controls))
    _require_order(nodes, before)
    op_types = [*table.types, *(node.op for node in nodes[len(table.types) :])]
    edited = NodeTable(nodes, [*number], op_types, reads, waits, order=(), frame=(), frames=())
    _require_same_kernels(kernels, table, edited)


def _require_same_kernels(kernels: Kernels, table: NodeTable, edited: NodeTable) -> None:
    """Check that TensorFlow merges the same nodes as before, and none at which it would end the process."""
    for node in sorted({*kernels.fatal(edited)} - {*kernels.fatal(table)}):
        raise RewriteError(f"{edited.names[node]} would wait for the same as the convolution before it")
    for first, second, *_ in sorted({*kernels.pairs(table)} ^ {*kernels.pairs(edited)}):
        pair = f"{edited.names[first]} and {edited.names[second]}"
        raise RewriteError(f"TensorFlow would no longer merge {pair} as it did, or would now")


class _Signature(NamedTuple):
    """The types of what a node reads and makes."""

    inputs: Sequence[int]
    outputs: Sequence[int]


class _Types:
    """The types of the outputs of a graph before and after its edit."""

    def __init__(
        self, table: NodeTable, outputs: Sequence[Sequence[Output]], added: Mapping[str, _Signature]
    ) -> None:
        self._number, self._outputs, self._added = table.number, outputs, added

    def of(self, name: str, index: int) -> int | None:
        """Return the type of an output; ``None`` where there is no such."""
        if name in self._added:
            made = self._added[name].outputs
            return made[index] if index < len(made) else None
        known = self._outputs[self._number[name]]
        return known[index].dtype if index < len(known) else None


def _signature(node: Any) -> _Signature:
    """Return the types of an added node's inputs and outputs, by the definition of its op.

    Raises:
        RewriteError: If this TensorFlow does not know the op, or the node lacks a device or an attribute.
    """
    definition = op_def_registry.get(node.op)
    if definition is None:
        raise RewriteError(f"{node.name} is of type {node.op!r}, which this TensorFlow does not know")
    if "/job:" not in node.device or "/device:" not in node.device:
        raise RewriteError(f"{node.name} has no device, or a part of a name: {node.device!r}")
    attrs = {attr.name: attr.default_value for attr in definition.attr if attr.HasField("default_value")}
    attrs.update(node.attr)
    for attr in definition.attr:
        if attr.name not in attrs:
            raise RewriteError(f"{node.name} has no attribute {attr.name}")

    def types(arguments: Iterable[Any]) -> list[int]:
        found: list[int] = []
        for one in arguments:
            if one.type_list_attr:
                found += attrs[one.type_list_attr].list.type
            else:
                dtype = one.type or attrs[one.type_attr].type
                found += [dtype] * (attrs[one.number_attr].i if one.number_attr else 1)
        return found

    return _Signature(types(definition.input_arg), types(definition.output_arg))


def _require_order(nodes: Sequence[Any], before: Sequence[Collection[int]]) -> None:
    """Check that the graph has no cycle, except through the turns of a loop."""
    waiting = [len(needed) for needed in before]
    after: list[list[int]] = [[] for _ in nodes]
    for place, needed in enumerate(before):
        for other in needed:
            after[other].append(place)
    ready = [place for place, count in enumerate(waiting) if not count]
    done = 0
    while ready:
        place = ready.pop()
        done += 1
        for later in after[place]:
            waiting[later] -= 1
            if not waiting[later]:
                ready.append(later)
    if done < len(nodes):
        stuck = next(place for place, count in enumerate(waiting) if count)
        raise RewriteError(f"{nodes[stuck].name} would wait for itself")


def require_same_pairs(kernels: Kernels, before: NodeTable, after: NodeTable) -> None:
    """Check that TensorFlow merges the same nodes in two graphs, whatever their numbers.

    Raises:
        RewriteError: If it does not.
    """
    pairs = [
        {(table.names[first], table.names[second]) for first, second, *_ in kernels.pairs(table)}
        for table in (before, after)
    ]
    for first_name, second_name in sorted(pairs[0] ^ pairs[1]):
        raise RewriteError(f"TensorFlow would merge {first_name} and {second_name} in one graph alone")
