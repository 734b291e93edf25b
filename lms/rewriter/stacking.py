"""Stack the lists that loops keep for their backward pass, each into one tensor, which a plan can swap.

A list is no plain memory: nothing can copy it off the device. Right behind the loop that has filled it, its
tensors are copied into one (``TensorListStack``) and the list goes; before the loop of the backward pass they
become a list again (``TensorListFromTensor``). Both copies keep every bit. One list is stacked after the
other, so that two copies exist of one list at most. And a loop makes one turn after the other: it may begin
up to 32 turns early what does not wait for the turn before, and all of that would lie on the device.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import tensorflow as tf

from lms.ir.op_traits import STACKED
from lms.optimizer.grappler_item import Output
from lms.reader.loop_lists import (
    EMPTY,
    FROM_TENSOR,
    STACK,
    VARIANT,
    ZEROS,
    LoopList,
    element_bytes,
    find_lists,
    list_length,
    read_only_list,
)
from lms.reader.node_table import ENTERS, MARK_ATTR, NodeTable, Source
from lms.reader.op_facts import has_kernel, size_of
from lms.reader.survey import Place
from lms.rewriter.writer import MARK

EMPTY_TENSOR = "Empty"
"""Makes zeros; TensorFlow folds no stateful op into a constant."""
FLOATS = frozenset(one.as_datatype_enum for one in (tf.bfloat16, tf.float16, tf.float32, tf.float64))
"""Types of the tensors in lists that are stacked: other ones are small, or lie on the host."""
INT32 = tf.int32.as_datatype_enum


@dataclass(frozen=True)
class Stackable:
    """Lists of one loop that hold the same tensors."""

    lists: tuple[LoopList, ...]
    length: int
    element: Output
    nbytes: int

    @property
    def exit(self) -> int:
        """The node that hands the list on which is stacked."""
        return self.lists[0].exits[0]


@dataclass(frozen=True)
class Stacked:
    """The lists that were stacked."""

    tensors: Mapping[str, Stackable] = field(default_factory=dict)
    """By the name of the node that makes the tensor."""
    nodes: tuple[str, ...] = ()
    """The names of the added nodes."""
    outputs: Mapping[str, Sequence[Output]] = field(default_factory=dict)
    """Type and shape of what each added node makes."""


def find_stackable(
    table: NodeTable,
    outputs: Sequence[Sequence[Output]],
    frame: int,
    place: Place,
    min_bytes: int,
) -> list[Stackable]:
    """Return the lists of a frame's loops that can be stacked, in the order of their loops' ends.

    Only later loops read them, and the number and the shape of their tensors are known.

    Args:
        table: The graph.
        outputs: Type and shape of the outputs of each node.
        frame: The frame that is planned.
        place: The device that is planned.
        min_bytes: Smaller lists stay.
    """
    groups: dict[tuple[Source, int], list[LoopList]] = {}
    for one in find_lists(table):
        if len(one.exits) != 1 or table.frame[one.exits[0]] != frame or table.types[one.begins] not in EMPTY:
            continue
        (end,) = one.exits
        only_loops = all(table.types[node] in ENTERS for node, _ in table.readers[end])
        dtype = outputs[one.element.node][one.element.index].dtype
        is_known = dtype in FLOATS and all(
            has_kernel(op, place.device_type, dtype, "element_dtype") for op in (STACK, FROM_TENSOR)
        )
        if one.pops and only_loops and is_known and place.holds(table.devices[end]):
            groups.setdefault((one.element, table.frame[one.fills]), []).append(one)
    found = []
    for lists in groups.values():
        length, nbytes = list_length(table, outputs, lists[0]), element_bytes(table, outputs, lists[0])
        if length and nbytes and length * nbytes >= max(1, min_bytes):
            element = outputs[lists[0].element.node][lists[0].element.index]
            found.append(Stackable((*lists,), length, element, length * nbytes))
    turn = {node: number for number, node in enumerate(table.order)}
    return sorted(found, key=lambda one: turn[one.exit])


class Zeros(NamedTuple):
    """A node that makes a list of zeros for a loop."""

    node: int
    like: Source
    """A tensor with the shape of all zeros together."""
    whole: Output
    loop: int


def find_zeros(
    table: NodeTable, outputs: Sequence[Sequence[Output]], frame: int, place: Place
) -> Iterator[Zeros]:
    """Yield the nodes that make lists of zeros for a later loop.

    They begin the gradient of a list, with a turn's input each, and would run as soon as the forward pass is
    done with that.
    """
    for node, op_type in enumerate(table.types):
        if op_type != ZEROS or table.frame[node] != frame or outputs[node][0].dtype != VARIANT:
            continue
        begins = read_only_list(table, table.inputs[node][0])
        loops = {table.frame[one] if table.types[one] in ENTERS else frame for one, _ in table.readers[node]}
        if begins is None or table.types[begins] != FROM_TENSOR or len(loops) != 1 or frame in loops:
            continue
        read = table.inputs[begins][0]
        if table.frame[read.node] != frame:
            continue
        whole = outputs[read.node][read.index]
        can = has_kernel(EMPTY_TENSOR, place.device_type, whole.dtype, "dtype")
        if whole.dtype in FLOATS and size_of(whole) and can and place.holds(table.devices[node]):
            yield Zeros(node, read, whole, *loops)


def stack_lists(
    graph_def: Any, table: NodeTable, lists: Collection[Stackable], zeros: Iterable[Zeros] = ()
) -> Stacked:
    """Edit ``graph_def`` so that these lists are stacked; its nodes are sorted anew.

    Args:
        graph_def: The graph.
        table: The same as a table.
        lists: What to stack, as :func:`find_stackable` returns it.
        zeros: Lists of zeros to make late, as :func:`find_zeros` yields them.
    """
    edit = _Edit(graph_def, table)
    for one in lists:
        edit.stack(one)
    for made in zeros:
        edit.zero_late(made)
    for node, op_type in zip(graph_def.node, table.types, strict=True):
        if op_type in ENTERS:
            node.attr["parallel_iterations"].i = 1
    edit.sort()
    return Stacked(edit.tensors, tuple(edit.outputs), edit.outputs)


class _Edit:
    def __init__(self, graph_def: Any, table: NodeTable) -> None:
        self._graph_def, self._table = graph_def, table
        self._place = {node: number for number, node in enumerate(table.order)}
        self._made = type(graph_def)()
        self._first: list[Any] = []
        """The new nodes that run as soon as they can."""
        self._before: dict[int, list[Any]] = {}
        """By a node of the graph the new nodes that stand before it."""
        self._latest: dict[tuple[str, int], str] = {}
        """The new node that runs last, of those that stack the lists of a loop, or that give it its lists."""
        self._enters: dict[int, list[int]] = {}
        """By the frame of a loop the nodes with which values come into it."""
        for node, op_type in enumerate(table.types):
            if op_type in ENTERS:
                self._enters.setdefault(table.frame[node], []).append(node)
        self.tensors: dict[str, Stackable] = {}
        self.outputs: dict[str, Sequence[Output]] = {}

    def stack(self, one: Stackable) -> None:
        """Stack one list behind its loop, and make it a list again before each loop that reads it."""
        table = self._table
        end, filled = table.names[one.exit], table.frame[one.lists[0].fills]
        base, device = f"{end}/{MARK}", table.devices[one.exit]
        shape = self._any_shape(f"{base}/shape", device, end)
        whole = Output(one.element.dtype, (one.length, *(one.element.dims or ())))
        stack = self._add(f"{base}/stack", STACK, device, [whole])
        stack.attr["element_dtype"].type = one.element.dtype
        stack.attr["num_elements"].i = -1
        stack.input.extend([end, shape.name])
        self._wait(stack, ("stack", filled))
        self._first += [shape, stack]
        self.tensors[stack.name] = one
        enters = [node for each in one.lists for node in each.enters]
        for loop in dict.fromkeys(table.frame[node] for node in enters):
            unstack = self._add(f"{base}/unstack_{loop}", FROM_TENSOR, device, [Output(VARIANT, ())])
            unstack.attr["element_dtype"].type = one.element.dtype
            unstack.attr["shape_type"].type = INT32
            unstack.input.extend([stack.name, shape.name])
            self._wait(unstack, ("unstack", loop))
            first = min(self._enters[loop])
            self._before.setdefault(first, []).append(unstack)
            for node in (node for node in enters if table.frame[node] == loop):
                table.nodes[node].input[0] = unstack.name

    def zero_late(self, zeros: Zeros) -> None:
        """Make a list of zeros where its loop needs it, with the sizes of the call."""
        table, (node, like, whole, loop) = self._table, zeros
        name, device, source = table.names[node], table.devices[node], table.names[like.node]
        sizes = self._add(f"{name}/{MARK}/sizes", "Shape", device, [Output(INT32, (len(whole.dims or ()),))])
        sizes.attr["T"].type = whole.dtype
        sizes.attr["out_type"].type = INT32
        sizes.input.append(table.text(like))
        shape = self._any_shape(f"{name}/{MARK}/shape", device, source)
        self._first += [sizes, shape]
        empty = self._add(f"{name}/{MARK}/zeros", EMPTY_TENSOR, device, [whole])
        empty.attr["dtype"].type = whole.dtype
        empty.attr["init"].b = True
        empty.input.append(sizes.name)
        self._wait(empty, ("unstack", loop))
        self._before.setdefault(min(self._enters[loop]), []).append(empty)
        changed = table.nodes[node]
        changed.op = FROM_TENSOR
        changed.input[:] = [empty.name, shape.name, *(text for text in changed.input if text[0] == "^")]
        changed.attr.clear()
        changed.attr[MARK_ATTR].s = STACKED.encode()
        changed.attr["element_dtype"].type = whole.dtype
        changed.attr["shape_type"].type = INT32
        self._latest["unstack", loop] = name

    def _any_shape(self, name: str, device: str, behind: str) -> Any:
        """Add a constant that stands for any shape: a call may have smaller ones than its plan is for.

        It waits for a node of the frame that is planned, and so is in that frame.
        """
        node = self._add(name, "Const", device, [Output(INT32, ())])
        node.attr["dtype"].type = INT32
        node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(-1, tf.int32))
        node.input.append(f"^{behind}")
        return node

    def _wait(self, node: Any, place: tuple[str, int]) -> None:
        """Have a node wait for the one before it at the same loop, or for what else that needs."""
        kind, loop = place
        if place in self._latest:
            node.input.append(f"^{self._latest[place]}")
        elif kind == "unstack" and (latest := self._latest_needed(loop)) is not None:
            node.input.append(f"^{self._table.names[latest]}")
        self._latest[place] = node.name

    def _latest_needed(self, loop: int) -> int | None:
        """Return the node that a loop waits for the longest, but for zeros: what its gradient begins with."""
        read = (self._table.inputs[node][0].node for node in self._enters[loop])
        others = [node for node in read if self._table.types[node] != ZEROS]
        return max(others, key=self._place.__getitem__, default=None)

    def _add(self, name: str, op_type: str, device: str, outputs: Sequence[Output]) -> Any:
        node = self._made.node.add(name=name, op=op_type, device=device)
        node.attr[MARK_ATTR].s = STACKED.encode()
        self.outputs[name] = outputs
        return node

    def sort(self) -> None:
        """Put each new node where it is to run: of those that may come next a plan takes the first one."""
        copies = type(self._graph_def)()
        copies.node.extend(self._first)
        for number, node in enumerate(self._graph_def.node):
            copies.node.extend([*self._before.get(number, ()), node])
        del self._graph_def.node[:]
        self._graph_def.node.extend(copies.node)
