"""The pass that reads a graph into a node table, and what its call tells of the nodes."""

from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

from tensorflow.core.framework import graph_pb2

from lms.passes.work import Task, Work
from lms.reader.node_table import MARK_ATTR, NodeTable


class Parsing:
    """Reads the bytes that TensorFlow has handed over into a node table."""

    name = "parse"

    def requires(self, work: Work) -> bool:
        """Tell whether the bytes have not been read yet."""
        return work.table is None

    def apply(self, work: Work) -> Work:
        """Add the GraphDef and its node table."""
        graph_def = work.graph_def
        if graph_def is None:
            graph_def = graph_pb2.GraphDef.FromString(work.task.request.graph)
        item = work.task.request.item
        table = NodeTable.of(graph_def, fed_nodes(work.task, graph_def))
        return replace(work, graph_def=graph_def, table=table, fetches=tuple(item.fetches()))


def fed_nodes(task: Task, graph_def: Any) -> set[str]:
    """Return the nodes in whose place a session feeds values.

    They are those that its call tells, and those that TensorFlow must preserve and does not fetch. A function
    has arguments instead, and there the preserved nodes are those with effects.
    """
    if any(node.op == "_Arg" for node in graph_def.node):
        return set()
    item = task.request.item
    fetched = {name.partition(":")[0] for name in item.fetches()}
    return {name.partition(":")[0] for name in task.hints.feeds}.union(set(item.preserved()) - fetched)


def kept_nodes(task: Task, graph_def: Any) -> set[str]:
    """Return the nodes that are fed, fetched or run, or that TensorFlow must preserve."""
    item = task.request.item
    fetched = {name.partition(":")[0] for name in item.fetches()}
    return fetched.union(item.preserved(), fed_nodes(task, graph_def))


def is_edited(graph_def: Any, serialised: bytes) -> bool:
    """Tell whether a graph holds nodes of an earlier edit."""
    return MARK_ATTR.encode() in serialised and any(MARK_ATTR in node.attr for node in graph_def.node)


def arguments_of(table: NodeTable, names: Collection[str]) -> Iterator[int]:
    """Yield the numbers of the arguments whose nodes have these names."""
    for name in names:
        if table.types[table.number[name]] == "_Arg":
            yield table.nodes[table.number[name]].attr["index"].i
