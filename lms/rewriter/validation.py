"""Check an edited graph before TensorFlow gets it.

TensorFlow answers a graph that it cannot build with one line in its log, and runs the step without any of its
optimizations: without swaps, and to other bits. So what it would refuse is found here.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

from tensorflow.python.framework import op_def_registry

from lms.device.kernels import Kernels
from lms.optimizer.grappler_item import Output
from lms.reader.node_table import (
    ENTERS,
    EXITS,
    ROOT,
    NodeTable,
    OutputNames,
    Source,
    nodes_before,
    topological_order,
)
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
            if nodes wait for each other, or for what is in another frame; or if TensorFlow would merge other
            nodes than before.
    """
    nodes = list(graph_def.node)
    names = [node.name for node in nodes]
    if len({*names}) < len(names):
        raise RewriteError("two nodes of the edited graph have one name")
    first_added, made = len(table.nodes), OutputNames.of(names)
    types = [*table.types, *(node.op for node in nodes[first_added:])]
    signatures = {made[name].node: _signature(nodes[made[name].node]) for name in added}
    known = [[output.dtype for output in of_node] for of_node in outputs]
    for place in signatures.keys() & range(first_added):
        if any(one != other for one, other in zip(known[place], signatures[place].outputs, strict=False)):
            raise RewriteError(f"{names[place]} makes other types than its readers take")
    output_types = [*known, *(signatures[place].outputs for place in range(first_added, len(nodes)))]
    for place in signatures.keys() & range(first_added):
        output_types[place] = signatures[place].outputs
    inputs, controls, before = list(table.inputs), list(table.controls), list(table.before)
    for column in (inputs, controls, before):
        column += [()] * (len(nodes) - first_added)
    is_renamed = names[:first_added] != [*table.names]
    for place, node in enumerate(nodes):
        texts = tuple(node.input)
        if place < first_added and texts == table.texts[place] and not is_renamed:
            continue  # it was valid
        if place in signatures:
            wanted = signatures[place].inputs
        else:
            wanted = [known[source.node][source.index] for source in table.inputs[place]]
        read, waits = _checked(node.name, texts, made, output_types, wanted)
        inputs[place], controls[place] = read, waits
        before[place] = nodes_before(types, types[place], read, waits)
    order = topological_order(before)
    if len(order) < len(nodes):
        stuck = min({*range(len(nodes))}.difference(order))
        raise RewriteError(f"{names[stuck]} would wait for itself")
    edited = NodeTable(nodes, names, types, inputs, controls)
    _require_one_frame(edited)
    _require_same_kernels(kernels, table, edited)


def _require_one_frame(edited: NodeTable) -> None:
    """Check that no node waits for one of another frame, but where a value enters a frame or leaves it.

    TensorFlow finds such a node only when the step runs, and has it fail.
    """
    if len(edited.frames) == 1:
        return
    for place, op_type in enumerate(edited.types):
        own = edited.frame[place]
        if op_type in EXITS:
            continue
        if op_type in ENTERS:
            own = edited.frames[own].parent or ROOT
        waited_for = (*(source.node for source in edited.inputs[place]), *edited.controls[place])
        if any(edited.frame[node] != own for node in waited_for):
            raise RewriteError(f"{edited.names[place]} would wait for what runs in another loop")


def _require_same_kernels(kernels: Kernels, table: NodeTable, edited: NodeTable) -> None:
    """Check that TensorFlow merges the same nodes as before, and none at which it would end the process."""
    for node in sorted({*kernels.fatal(edited)} - {*kernels.fatal(table)}):
        raise RewriteError(f"{edited.names[node]} would wait for the same as the convolution before it")
    for first, second, *_ in sorted({*kernels.pairs(table)} ^ {*kernels.pairs(edited)}):
        pair = f"{edited.names[first]} and {edited.names[second]}"
        raise RewriteError(f"TensorFlow would no longer merge {pair} as it did, or would now")


class _Signature(NamedTuple):
    """The types of what a node reads and makes."""

    inputs: list[int]
    outputs: list[int]


def _checked(
    name: str,
    texts: Sequence[str],
    made: OutputNames,
    output_types: Sequence[Sequence[int]],
    wanted: Sequence[int],
) -> tuple[tuple[Source, ...], tuple[int, ...]]:
    """Return what a node reads and what it waits for.

    Raises:
        RewriteError: If something of that is not there, or of another type than is ``wanted``.
    """
    read: list[Source] = []
    waits: list[int] = []
    for text in texts:
        try:
            source = made[text.removeprefix("^")]
        except KeyError:
            raise RewriteError(f"{name} reads {text}, which is not there") from None
        if text[0] == "^":
            waits.append(source.node)
            continue
        if waits:
            raise RewriteError(f"{name} reads {text} behind a control input")
        if source.index >= len(output_types[source.node]):
            raise RewriteError(f"{name} reads {text}, an output that is not there")
        if len(read) < len(wanted) and output_types[source.node][source.index] != wanted[len(read)]:
            raise RewriteError(f"{name} reads {text}, which is of another type than it takes")
        read.append(source)
    if len(read) != len(wanted):
        raise RewriteError(f"{name} reads {len(read)} tensors; needed {len(wanted)}")
    return tuple(read), tuple(waits)


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
    for name in (*(attr.name for attr in definition.attr), *node.attr):
        if name not in attrs or name in node.attr and node.attr[name].WhichOneof("value") is None:
            raise RewriteError(f"{node.name} has no attribute {name}, or no value for it")

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
