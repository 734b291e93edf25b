"""A GraphDef as a table: the inputs, the control inputs and the loop (frame) of each node."""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from heapq import heapify, heappop, heappush
from typing import Any, NamedTuple

from lms.errors import UnreadableError
from lms.ir.op_traits import MERGES

ENTERS = frozenset({"Enter", "RefEnter"})
EXITS = frozenset({"Exit", "RefExit"})
TURNS = frozenset({"NextIteration", "RefNextIteration"})
SWITCHES = frozenset({"Switch", "RefSwitch", "_SwitchN"})
HANDED_ON = SWITCHES | {"Identity"}
"""Types of the nodes through which the handle of a variable gets into the branch of a condition."""

MARK_ATTR = "_lms"
"""Attribute of every node that an edit has added; its value says what the node is for."""

ROOT = 0
"""The frame of what runs once."""

CALLS = re.compile(
    r"(?:(?:Stateful)?PartitionedCall(?:_\d+)?/|while(?:_\d+)?/body/_\d+/|while(?:_\d+)?/(?=State))+"
)
"""What TensorFlow puts in front of a name when it takes a function's or a loop's body into its caller."""
CALLED = ("PartitionedCall", "StatefulPartitionedCall", "while")
"""The beginnings of such names."""


class Source(NamedTuple):
    """An output of a node."""

    node: int
    index: int  # type: ignore[assignment]


class OutputNames(dict[str, Source]):
    """The outputs of a graph's nodes, by the text with which the input of a NodeDef names them."""

    @classmethod
    def of(cls, names: Iterable[str]) -> "OutputNames":
        """Begin with the first output of each node; the others are found when they are asked for."""
        return cls((name, Source(place, 0)) for place, name in enumerate(names))

    def __missing__(self, text: str) -> Source:
        name, colon, index = text.partition(":")
        if not colon:
            raise KeyError(text)
        source = self[text] = Source(self[name].node, int(index or 0))
        return source


@dataclass(frozen=True)
class Frame:
    """A loop of TensorFlow's executor, which it runs turn by turn; the first frame is the graph itself."""

    name: str
    parent: int | None


@dataclass(frozen=True)
class NodeTable:
    """The nodes of a graph by number, their place in the GraphDef. An edit changes none but ``nodes``."""

    nodes: Sequence[Any]
    """The NodeDefs."""
    names: Sequence[str]
    types: Sequence[str]
    inputs: Sequence[tuple[Source, ...]]
    """What each node reads, by slot."""
    controls: Sequence[tuple[int, ...]]
    """The nodes that each node waits for beside its inputs."""
    devices: Sequence[str] = ()
    """Empty in the table of an edited graph, like ``texts``."""
    texts: Sequence[tuple[str, ...]] = ()
    """What each node reads and waits for, as its NodeDef has it."""

    @classmethod
    def of(cls, graph_def: Any, fed: Collection[str] = ()) -> "NodeTable":
        """Read a GraphDef.

        Args:
            graph_def: The graph.
            fed: Nodes in whose place a session feeds values. Such a node has the type of a placeholder here.

        Raises:
            UnreadableError: If a node reads one that is not there.
        """
        nodes = list(graph_def.node)
        names = [node.name for node in nodes]
        types = ["Placeholder" if name in fed else node.op for name, node in zip(names, nodes, strict=True)]
        texts = [tuple(node.input) for node in nodes]
        outputs = OutputNames.of(names)
        inputs: list[tuple[Source, ...]] = []
        controls: list[tuple[int, ...]] = []
        try:
            for read in texts:
                inputs.append(tuple([outputs[text] for text in read if text[0] != "^"]))
                controls.append(tuple([outputs[text[1:]].node for text in read if text[0] == "^"]))
        except KeyError as error:
            raise UnreadableError(f"a node reads {error}, which the graph does not have") from error
        return cls(nodes, names, types, inputs, controls, [node.device for node in nodes], texts)

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

    def text(self, source: Source) -> str:
        """Write an output as the input of a NodeDef names it."""
        name = self.names[source.node]
        return f"{name}:{source.index}" if source.index else name

    def users(self, handle: int) -> set[int]:
        """Return the nodes that use a variable through the node of its handle, also under a condition."""
        found, open_nodes = set[int](), [handle]
        while open_nodes:
            readers = self.readers[open_nodes.pop()]
            for user in {one for one, slot in readers if not (slot and self.types[one] in SWITCHES)} - found:
                found.add(user)
                if self.types[user] in HANDED_ON:
                    open_nodes.append(user)
        return {user for user in found if self.types[user] not in HANDED_ON}

    def handle(self, node: int) -> int:
        """Return the node from which a handle comes that ``node`` hands on, or ``node`` itself."""
        while self.types[node] in HANDED_ON:
            node = self.inputs[node][0].node
        return node

    @cached_property
    def before(self) -> Sequence[Collection[int]]:
        """The nodes that have to run before each node: what it reads, but for a next turn, and waits for."""
        return [
            nodes_before(self.types, *one) for one in zip(self.types, self.inputs, self.controls, strict=True)
        ]

    @cached_property
    def order(self) -> Sequence[int]:
        """An order in which every input comes first, but for a next turn; else as in the GraphDef.

        Raises:
            UnreadableError: If the graph holds a loop of no frame.
        """
        order = topological_order(self.before)
        if len(order) < len(self.nodes):
            raise UnreadableError("the graph holds a cycle outside of its loops")
        return order

    @property
    def frame(self) -> Sequence[int]:
        """The frame in which each node's outputs are."""
        return self._framed[0]

    @property
    def frames(self) -> Sequence[Frame]:
        """All frames."""
        return self._framed[1]

    @cached_property
    def _framed(self) -> tuple[Sequence[int], Sequence[Frame]]:
        if ENTERS.isdisjoint(self.types):
            return [ROOT] * len(self.nodes), [Frame("", None)]
        return _find_frames(self)

    @cached_property
    def marks(self) -> Mapping[int, str]:
        """The nodes that an edit has added, each with what it is for."""
        return {
            place: node.attr[MARK_ATTR].s.decode()
            for place, node in enumerate(self.nodes)
            if MARK_ATTR in node.attr
        }

    def add_waits(self, waits: Collection[tuple[int, int]]) -> "NodeTable":
        """Add control inputs to the NodeDefs, and return the table of the graph with them.

        Args:
            waits: Nodes, each with one that it is to wait for.
        """
        controls, texts = list(self.controls), list(self.texts)
        new = dict.fromkeys((node, other) for node, other in waits if other not in controls[node])
        for node, other in new:
            controls[node] += (other,)
            texts[node] += (f"^{self.names[other]}",)
            self.nodes[node].input.append(texts[node][-1])
        return replace(self, controls=controls, texts=texts) if new else self

    def without_waits(self, nodes: Collection[int]) -> "NodeTable":
        """Delete the control inputs of some nodes from their NodeDefs, and return the table without them."""
        controls, texts = list(self.controls), list(self.texts)
        for node in nodes:
            controls[node] = ()
            texts[node] = tuple(text for text in texts[node] if text[0] != "^")
            del self.nodes[node].input[len(texts[node]) :]  # control inputs come last
        return replace(self, controls=controls, texts=texts) if nodes else self

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
        begins = CALLS.match(name) if name.startswith(CALLED) else None
        return name[begins.end() :] if begins else name


def nodes_before(
    types: Sequence[str], op_type: str, inputs: Iterable[Source], controls: Iterable[int]
) -> set[int]:
    """Return the nodes that have to run before one that reads ``inputs`` and waits for ``controls``."""
    if op_type in MERGES:
        inputs = [source for source in inputs if types[source.node] not in TURNS]
    return {node for node, _ in inputs}.union(controls)


def topological_order(before: Sequence[Collection[int]], last: Collection[int] = ()) -> list[int]:
    """Sort numbers so that those before each come first; of those that may come next, the lowest is taken.

    What a cycle keeps from coming is left out.

    Args:
        before: By number those that come first.
        last: Numbers that are taken only where no other may come next.
    """
    waiting = [len(needed) for needed in before]
    after = inverted(before)
    ready = [(number in last, number) for number, count in enumerate(waiting) if not count]
    heapify(ready)
    order = []
    while ready:
        _, number = heappop(ready)
        order.append(number)
        for later in after[number]:
            waiting[later] -= 1
            if not waiting[later]:
                heappush(ready, (later in last, later))
    return order


def inverted(before: Sequence[Collection[int]]) -> list[list[int]]:
    """Return by number those that wait for it."""
    after: list[list[int]] = [[] for _ in before]
    for number, needed in enumerate(before):
        for other in needed:
            after[other].append(number)
    return after


def _find_frames(table: NodeTable) -> tuple[list[int], list[Frame]]:
    """Find the frame of each node; return these and all frames."""
    types, inputs, controls = table.types, table.inputs, table.controls
    frames = [Frame("", None)]
    known: dict[tuple[int, str], int] = {}
    frame = [ROOT] * len(types)
    for node in table.order:
        if inputs[node]:
            # Of a merge the first input may be the next turn's, whose frame is not known yet.
            read = next((s.node for s in inputs[node] if types[s.node] not in TURNS), inputs[node][0].node)
            current = frame[read]
        elif controls[node]:
            current = frame[controls[node][0]]
        else:
            continue
        if types[node] in ENTERS:
            name = table.nodes[node].attr["frame_name"].s.decode()
            child = known.setdefault((current, name), len(frames))
            if child == len(frames):
                frames.append(Frame(name, current))
            current = child
        elif types[node] in EXITS:
            current = frames[current].parent or ROOT
        frame[node] = current
    return frame, frames
