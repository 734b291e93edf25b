"""A GraphDef as a table: the inputs, the control inputs and the loop (frame) of each node."""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from lms.errors import UnreadableError

ENTERS = frozenset({"Enter", "RefEnter"})
EXITS = frozenset({"Exit", "RefExit"})
TURNS = frozenset({"NextIteration", "RefNextIteration"})
MERGES = frozenset({"Merge", "RefMerge"})
SWITCHES = frozenset({"Switch", "RefSwitch"})

ROOT = 0
"""The frame of what runs once."""

CALLS = re.compile(
    r"(?:(?:Stateful)?PartitionedCall(?:_\d+)?/|while(?:_\d+)?/body/_\d+/|while(?:_\d+)?/(?=State))+"
)
"""What TensorFlow puts in front of a name when it takes a function's or a loop's body into its caller."""


class Source(NamedTuple):
    """An output of a node."""

    node: int
    index: int  # type: ignore[assignment]


@dataclass(frozen=True)
class Frame:
    """A loop of TensorFlow's executor, which it runs turn by turn; the first frame is the graph itself."""

    name: str
    parent: int | None


@dataclass(frozen=True)
class NodeTable:
    """The nodes of a graph by number, which is their place in the GraphDef."""

    nodes: Sequence[Any]
    """The NodeDefs."""
    names: Sequence[str]
    types: Sequence[str]
    inputs: Sequence[tuple[Source, ...]]
    """What each node reads, by slot."""
    controls: Sequence[tuple[int, ...]]
    """The nodes that each node waits for beside its inputs."""
    order: Sequence[int]
    """An order in which every input comes first, but for the next turn of a loop; else as in the GraphDef."""
    frame: Sequence[int]
    """The frame in which each node's outputs are."""
    frames: Sequence[Frame]

    @classmethod
    def of(cls, graph_def: Any, fed: Collection[str] = ()) -> "NodeTable":
        """Read a GraphDef.

        Args:
            graph_def: The graph.
            fed: Nodes in whose place a session feeds values. Such a node has the type of a placeholder here.

        Raises:
            UnreadableError: If a node reads one that is not there, or the graph holds a loop of no frame.
        """
        nodes = list(graph_def.node)
        names = [node.name for node in nodes]
        types = ["Placeholder" if node.name in fed else node.op for node in nodes]
        number = {name: place for place, name in enumerate(names)}
        inputs: list[tuple[Source, ...]] = []
        controls: list[tuple[int, ...]] = []
        try:
            for node in nodes:
                read, waits = [], []
                for text in node.input:
                    if text[0] == "^":
                        waits.append(number[text[1:]])
                    else:
                        name, _, index = text.partition(":")
                        read.append(Source(number[name], int(index or 0)))
                inputs.append(tuple(read))
                controls.append(tuple(waits))
        except KeyError as error:
            raise UnreadableError(f"a node reads {error}, which the graph does not have") from error
        order = _topological(types, inputs, controls)
        frame, frames = _frames(nodes, types, inputs, controls, order)
        return cls(nodes, names, types, inputs, controls, order, frame, frames)

    @cached_property
    def number(self) -> dict[str, int]:
        """The number of each node, by its name."""
        return {name: place for place, name in enumerate(self.names)}

    @cached_property
    def readers(self) -> Sequence[Sequence[tuple[int, int]]]:
        """For each node the readers of its outputs: (node, slot)."""
        readers: list[list[tuple[int, int]]] = [[] for _ in self.nodes]
        for node, read in enumerate(self.inputs):
            for slot, source in enumerate(read):
                readers[source.node].append((node, slot))
        return readers

    def attr(self, node: int, name: str) -> object:
        """Return an attribute as a plain value: text as ``str``, a data type as its number.

        ``None`` where the node does not have it.
        """
        held = self.nodes[node].attr
        if name not in held:
            return None
        kind = held[name].WhichOneof("value")
        found = getattr(held[name], kind or "s")
        if kind == "list":
            return [*(one.decode() for one in found.s), *found.i, *found.f, *found.b, *found.type]
        return found.decode() if isinstance(found, bytes) else found

    def is_within(self, frame: int, outer: int) -> bool:
        """Tell whether a frame is ``outer`` or lies within it."""
        found: int | None = frame
        while found is not None and found != outer:
            found = self.frames[found].parent
        return found == outer

    def bare_name(self, node: int) -> str:
        """Return the name that a node had in the function where it was traced."""
        name = self.names[node]
        begins = CALLS.match(name)
        return name[begins.end() :] if begins else name


def _topological(
    types: Sequence[str], inputs: Sequence[tuple[Source, ...]], controls: Sequence[tuple[int, ...]]
) -> list[int]:
    """Sort nodes so that those they need come first; of those that may come next, the lowest number."""
    from heapq import heapify, heappop, heappush

    waiting = [0] * len(types)
    after: list[list[int]] = [[] for _ in types]
    for node, (read, waits) in enumerate(zip(inputs, controls, strict=True)):
        is_merge = types[node] in MERGES
        before = {source.node for source in read if not (is_merge and types[source.node] in TURNS)}
        before.update(waits)
        waiting[node] = len(before)
        for other in before:
            after[other].append(node)
    ready = [node for node, count in enumerate(waiting) if not count]
    heapify(ready)
    order = []
    while ready:
        node = heappop(ready)
        order.append(node)
        for later in after[node]:
            waiting[later] -= 1
            if not waiting[later]:
                heappush(ready, later)
    if len(order) < len(types):
        raise UnreadableError("the graph holds a cycle outside of its loops")
    return order


def _frames(
    nodes: Sequence[Any],
    types: Sequence[str],
    inputs: Sequence[tuple[Source, ...]],
    controls: Sequence[tuple[int, ...]],
    order: Sequence[int],
) -> tuple[list[int], list[Frame]]:
    """Find the frame of each node; return these and all frames."""
    frames = [Frame("", None)]
    if ENTERS.isdisjoint(types):
        return [ROOT] * len(nodes), frames
    known: dict[tuple[int, str], int] = {}
    frame = [ROOT] * len(nodes)
    for node in order:
        if inputs[node]:
            # Of a merge the first input may be the next turn's, whose frame is not known yet.
            read = next((s.node for s in inputs[node] if types[s.node] not in TURNS), inputs[node][0].node)
            current = frame[read]
        elif controls[node]:
            current = frame[controls[node][0]]
        else:
            continue
        if types[node] in ENTERS:
            name = nodes[node].attr["frame_name"].s.decode()
            child = known.setdefault((current, name), len(frames))
            if child == len(frames):
                frames.append(Frame(name, current))
            current = child
        elif types[node] in EXITS:
            current = frames[current].parent or ROOT
        frame[node] = current
    return frame, frames
