"""Delete the nodes of a graph that nothing needs any more."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from tensorflow.core.framework import graph_pb2
from tensorflow.python.framework import op_def_registry

from lms.reader.node_table import SWITCHES

BESIDE, BESIDE_NODE = "_class", "loc:@"
"""The attribute with the names of the nodes beside which a node was placed, and what is before each."""


def without_needless(graph_def: Any, kept: Collection[str]) -> Any:
    """Return a graph of those nodes that have effects, are ``kept``, or are used by such.

    Args:
        graph_def: The graph; its nodes are changed.
        kept: The names of the nodes that are fed, fetched or run.
    """
    by_name = {node.name: node for node in graph_def.node}
    _wait_past_anchors(by_name, kept)
    pending = [name for name, node in by_name.items() if name in kept or _has_effects(node.op)]
    needed = set(pending)
    while pending:
        read = {text.removeprefix("^").partition(":")[0] for text in by_name[pending.pop()].input}
        pending.extend(read - needed)
        needed |= read
    made = graph_pb2.GraphDef(versions=graph_def.versions, library=graph_def.library)
    made.node.extend(node for name, node in by_name.items() if name in needed)
    _forget_neighbours(made)
    return made


def _wait_past_anchors(nodes: Mapping[str, Any], kept: Collection[str]) -> None:
    """Have nothing wait for a node that only hands a tensor on, and holds it until all has run it waits for.

    TensorFlow writes them for what waited for one branch of a condition.
    """
    read = {text.partition(":")[0] for node in nodes.values() for text in node.input if text[0] != "^"}
    anchors: dict[str, list[str]] = {}
    for name, node in nodes.items():
        if node.op == "Identity" and name not in read and name not in kept:
            waits = [text.removeprefix("^").partition(":")[0] for text in node.input]
            if nodes[waits[0]].op not in SWITCHES:  # which runs whichever of its outputs comes
                anchors[name] = waits
    for node in nodes.values():
        before = [text[1:] for text in node.input if text[0] == "^"]
        if anchors.keys().isdisjoint(before):
            continue
        tensors = [text for text in node.input if text[0] != "^"]
        del node.input[:]
        node.input.extend(tensors)
        node.input.extend(f"^{name}" for name in dict.fromkeys(_past(before, anchors)))


def _past(names: Iterable[str], anchors: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Yield what to wait for in place of ``names``."""
    for name in names:
        if name in anchors:
            yield from _past(anchors[name], anchors)
        else:
            yield name


def _forget_neighbours(graph_def: Any) -> None:
    """Delete the notes that nodes were placed beside others that are gone; all have their devices."""
    names = {node.name for node in graph_def.node}
    for node in (one for one in graph_def.node if BESIDE in one.attr):
        beside = node.attr[BESIDE].list.s
        left = [one for one in beside if one.decode().removeprefix(BESIDE_NODE) in names]
        if len(left) < len(beside):
            beside[:] = left


def _has_effects(op_type: str) -> bool:
    definition = op_def_registry.get(op_type)
    return definition is None or definition.is_stateful
