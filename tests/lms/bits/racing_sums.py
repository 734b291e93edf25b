"""Finds sums whose order TensorFlow leaves to chance: the first input that is free by then goes first.

``AddN`` adds its inputs in order, but begins with the first one whose buffer nobody else holds any more, and
writes into it. Where another reader of an input is neither before nor behind the sum, the two race.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator
from typing import Any

LEAST = 3
"""Of two terms either may be the first."""
UNDECIDED = {
    *("Switch", "RefSwitch", "Merge", "Enter", "Exit", "NextIteration"),
    *("Unpack", "Split", "SplitV", "Slice", "StridedSlice"),
    *("All", "Any", "Max", "Mean", "Min", "Prod", "Sum"),
    *("BroadcastTo", "MirrorPad", "Pad", "Tile", "Transpose"),
}
"""What these give may be their input or a part of it: the branch that is taken, the turns of a loop, or the
shapes decide."""
SAME_BUFFER = set("Identity Reshape Squeeze ExpandDims StopGradient PreventGradient CheckNumerics".split())
"""Ops whose result lies in the buffer of their first input."""
KEPT = {"Const", "_Arg", "ReadVariableOp", "Placeholder", "HostConst", "VarHandleOp"}
"""What these give lives on behind every reader."""

Tensor = tuple[str, int]


class Readers:
    """Who reads what in a graph, and who waits for whom."""

    def __init__(self, graph: Any, fetches: Collection[str] = ()) -> None:
        self._fetches = {(name, int(slot or 0)) for name, _, slot in (one.partition(":") for one in fetches)}
        self.nodes = {node.name: node for node in graph.node}
        self.readers: dict[Tensor, list[str]] = defaultdict(list)
        for node in graph.node:
            for tensor in data_inputs(node):
                self.readers[tensor].append(node.name)
        self._before: dict[str, frozenset[str]] = {}

    def before(self, name: str) -> frozenset[str]:
        """All ops that have ended when this one begins; a loop's turns before do not count."""
        if name not in self._before:
            seen: set[str] = set()
            waiting = [name]
            while waiting:
                node = self.nodes[waiting.pop()]
                for text in node.input:
                    source = text.lstrip("^").partition(":")[0]
                    if source in self.nodes and source not in seen:
                        if node.op == "Merge" and self.nodes[source].op == "NextIteration":
                            continue
                        seen.add(source)
                        waiting.append(source)
            self._before[name] = frozenset(seen)
        return self._before[name]

    def holders(self, tensor: Tensor) -> Iterator[str]:
        """The readers of a tensor and of all that may lie in the same buffer; ``KEPT`` where it stays."""
        buffer, waiting = {tensor}, [tensor]
        while waiting:
            name, _ = one = waiting.pop()
            node = self.nodes.get(name)
            if node is None or node.op in KEPT or one in self._fetches:
                yield next(iter(KEPT))
                return
            if node.op in UNDECIDED:
                yield name
                continue
            near = [*data_inputs(node)][:1] if node.op in SAME_BUFFER else []
            for reader in self.readers[one]:
                if self.nodes[reader].op in SAME_BUFFER:
                    near += [key for key in {*self.readers, *self._fetches} if key[0] == reader]
            for other in near:
                if other not in buffer:
                    buffer.add(other)
                    waiting.append(other)
        for one in buffer:
            for reader in self.readers[one]:
                if self.nodes[reader].op not in SAME_BUFFER:
                    yield reader


def data_inputs(node: Any) -> Iterator[Tensor]:
    """The tensors that an op reads."""
    for text in node.input:
        if not text.startswith("^"):
            name, _, place = text.partition(":")
            yield name, int(place or 0)


def racing_sums(graph: Any, fetches: Collection[str] = ()) -> list[str]:
    """Find the sums in a graph whose order is left to chance.

    Args:
        graph: A GraphDef as it runs.
        fetches: The tensors that a session gives to its caller, as ``name:index``.
    """
    readers = Readers(graph, fetches)
    sums = [node for node in graph.node if node.op == "AddN" and len([*data_inputs(node)]) >= LEAST]
    return [node.name for node in sums if len(_firsts(node, readers)) > 1]


def _firsts(node: Any, readers: Readers) -> set[int]:
    """The inputs that may come first; the first two are one, for their order does not matter."""
    found, before = set(), []
    for place, tensor in enumerate(data_inputs(node)):
        beside = _beside(tensor, node, readers)
        if beside is None:
            continue
        if not any(other <= beside for other in before):  # else another is free as soon as this one is
            found.add(place if place > 1 else 0)
        if not beside:
            return found
        before.append(beside)
    return found | {0}


def _beside(tensor: Tensor, node: Any, readers: Readers) -> set[str] | None:
    """The other readers of an input that neither wait for the sum nor it for them; ``None``: never free."""
    others = [*readers.holders(tensor)]
    if node.name in others:
        others.remove(node.name)
    found = set()
    for other in others:
        if other not in KEPT and readers.nodes[other].op in UNDECIDED:
            found.add(other)  # whether it holds the buffer by then is known once it has run
        elif other in KEPT or other == node.name or node.name in readers.before(other):
            return None
        elif other not in readers.before(node.name):
            found.add(other)
    return found
