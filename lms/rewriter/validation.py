"""Checks an edited graph before TensorFlow gets it.

TensorFlow answers a graph that it cannot build with one line in its log, and runs the step without any of its
optimizations: without swaps, and to other bits. So what it would refuse is found here.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from tensorflow.python.framework import op_def_registry

from lms.optimizer.grappler_item import Output
from lms.reader.node_table import MERGES, TURNS, NodeTable
from lms.rewriter.writer import RewriteError


def validate(
    graph_def: Any, table: NodeTable, outputs: Sequence[Sequence[Output]], added: Mapping[str, int]
) -> None:
    """Check that an edited graph can be built and run.

    Args:
        graph_def: The edited graph.
        table: The graph as it was read.
        outputs: Type and shape of the outputs of each node of ``table``.
        added: The type that each added node makes, by its name.

    Raises:
        RewriteError: If two nodes have one name, a node has no device or an unknown type, reads what is not
            there or is of another type than before, or if nodes wait for each other.
    """
    nodes = list(graph_def.node)
    number = {node.name: place for place, node in enumerate(nodes)}
    if len(number) < len(nodes):
        raise RewriteError("two nodes of the edited graph have one name")
    dtypes = _Types(table, outputs, added)
    for name in added:
        _require_runnable(nodes[number[name]])
    before: list[set[int]] = []
    for place, node in enumerate(nodes):
        needed: set[int] = set()
        data_done = False
        old = table.inputs[place] if place < len(table.nodes) else ()
        for slot, text in enumerate(node.input):
            is_control = text[0] == "^"
            name, _, index = text.removeprefix("^").partition(":")
            maker = number.get(name)
            if maker is None:
                raise RewriteError(f"{node.name} reads {text}, which is not there")
            if data_done and not is_control:
                raise RewriteError(f"{node.name} reads {text} behind a control input")
            data_done = data_done or is_control
            if not is_control:
                made = dtypes.of(name, int(index or 0))
                if made is None:
                    raise RewriteError(f"{node.name} reads {text}, an output that is not there")
                if slot < len(old) and made != outputs[old[slot].node][old[slot].index].dtype:
                    raise RewriteError(f"{node.name} reads {text} of another type than before")
            if not (node.op in MERGES and nodes[maker].op in TURNS):
                needed.add(maker)
        before.append(needed)
    _require_order(nodes, before)


class _Types:
    """The types of the outputs of a graph before and after its edit."""

    def __init__(
        self, table: NodeTable, outputs: Sequence[Sequence[Output]], added: Mapping[str, int]
    ) -> None:
        self._number, self._outputs, self._added = table.number, outputs, added

    def of(self, name: str, index: int) -> int | None:
        """The type of an output; ``None`` where there is no such."""
        if name in self._added:  # a node has outputs of one type, and few have several
            return self._added[name]
        made = self._outputs[self._number[name]]
        return made[index].dtype if index < len(made) else None


def _require_runnable(node: Any) -> None:
    if op_def_registry.get(node.op) is None:
        raise RewriteError(f"{node.name} is of type {node.op!r}, which this TensorFlow does not know")
    if not node.device:
        raise RewriteError(f"{node.name} has no device")


def _require_order(nodes: Sequence[Any], before: Sequence[Collection[int]]) -> None:
    """Check that no nodes wait for each other but over the turns of a loop."""
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
