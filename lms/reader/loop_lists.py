"""Find the lists that loops fill, one tensor a turn, most of them for a loop of the backward pass.

A loop with a gradient (``while_v2.py``) begins with an empty list for each tensor that its backward pass
reads, pushes that tensor in each turn, and hands the list on at its end. The loop of the backward pass takes
one tensor in each turn. TensorFlow infers no size for a list; it has as many tensors as the loop makes turns.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import tensorflow as tf

from lms.ir.liveness import round_up
from lms.ir.op_traits import ALIAS_TYPES, CONSTANTS, MERGES, OUTSIDE_TYPES
from lms.optimizer.grappler_item import Output
from lms.reader.node_table import ENTERS, EXITS, SWITCHES, TURNS, NodeTable, Source
from lms.reader.op_facts import item_bytes, size_of

VARIANT = tf.variant.as_datatype_enum
PUSH, SET, POP = "TensorListPushBack", "TensorListSetItem", "TensorListPopBack"
GET = "TensorListGetItem"
STACK, FROM_TENSOR = "TensorListStack", "TensorListFromTensor"
ZEROS = "ZerosLike"
"""Makes a list with as many tensors of zeros."""
ELEMENT_SLOTS = {PUSH: 1, SET: 2}
"""Ops that put a tensor into a list, with the input that it is."""
ADDS = frozenset({"Add", "AddV2"})
"""Ops that a counter may be counted on by."""
SUBTRACTS = "Sub"
COMPARISONS = {"Less": (1, False), "LessEqual": (1, True), "Greater": (-1, False), "GreaterEqual": (-1, True)}
"""Ops that may end a loop: whether the first input counts up or down, and whether it may reach the second."""
EMPTY = frozenset({"EmptyTensorList", "TensorListReserve"})
"""Ops that make a list without tensors; the second input says for how many."""


@dataclass(frozen=True)
class LoopList:
    """A list that a loop fills."""

    fills: int
    """The node that puts a tensor into it in each turn."""
    element: Source
    """The tensor that it puts there."""
    begins: int
    """The node that makes the list."""
    exits: tuple[int, ...]
    """The nodes that hand it on behind the loop."""
    enters: tuple[int, ...]
    """The nodes with which it comes into a later loop."""
    pops: tuple[int, ...]
    """The nodes that take the tensors from it there."""


def find_lists(table: NodeTable) -> Iterator[LoopList]:
    """Yield the lists that loops fill with one tensor in each turn."""
    if len(table.frames) == 1:
        return
    for node, op_type in enumerate(table.types):
        slot = ELEMENT_SLOTS.get(op_type)
        if slot is None:
            continue
        split = handed_on(table, table.inputs[node][0])
        begins = _begins(table, split.node, Source(node, 0))
        if begins is None:
            continue
        exits = _readers(table, Source(split.node, 0), EXITS)
        enters = [one for end in exits for one in _readers(table, Source(end, 0), ENTERS)]
        pops = [pop for one in enters for pop in _pops(table, one)]
        yield LoopList(node, table.inputs[node][slot], begins, (*exits,), (*enters,), (*pops,))


def read_only_list(table: NodeTable, source: Source) -> int | None:
    """Return the node that makes the list which an output is, also where a loop hands it on unchanged.

    ``None`` where a loop may change it.
    """
    source = handed_on(table, source)
    while table.types[source.node] in EXITS:
        split = table.inputs[source.node][0].node
        begins = _begins(table, split, Source(split, 1))
        if begins is None:
            return None
        source = Source(begins, 0)
    return source.node


def tensor_of_list(table: NodeTable, source: Source) -> Source | None:
    """Return the tensor whose parts are in a list that a loop reads and does not change, or ``None``."""
    source = handed_on(table, source)
    begins: int | None = source.node
    if table.types[source.node] in SWITCHES:
        begins = _begins(table, source.node, Source(source.node, 1))
    elif table.types[source.node] in ENTERS:
        begins = handed_on(table, table.inputs[source.node][0]).node
    if begins is None or table.types[begins] != FROM_TENSOR:
        return None
    return table.inputs[begins][0]


def _begins(table: NodeTable, split: int, left: Source) -> int | None:
    """Return the node that makes the list which a ``Switch`` hands to each turn.

    ``None`` where the list is none of the loop's own values, or a turn leaves another one than ``left``.
    """
    if table.types[split] not in SWITCHES:
        return None
    merge = table.inputs[split][0].node
    if table.types[merge] not in MERGES:
        return None
    begins = None
    for source in table.inputs[merge]:
        before = table.inputs[source.node][0]
        if table.types[source.node] in TURNS:
            if handed_on(table, before) != left:
                return None
        elif table.types[source.node] in ENTERS:
            begins = handed_on(table, before).node
    return begins


def _pops(table: NodeTable, enter: int) -> Iterator[int]:
    """Yield the nodes that take from a list which comes into a loop."""
    for merge in _readers(table, Source(enter, 0), MERGES):
        for split in _readers(table, Source(merge, 0), SWITCHES):
            for one in (split, *_readers(table, Source(split, 1), {"Identity"})):
                yield from _readers(table, Source(one, 1 if one == split else 0), {POP})


def _readers(table: NodeTable, source: Source, types: frozenset[str] | set[str]) -> list[int]:
    return [
        node
        for node, slot in table.readers[source.node]
        if table.types[node] in types and table.inputs[node][slot] == source
    ]


def list_length(table: NodeTable, outputs: Sequence[Sequence[Output]], one: LoopList) -> int | None:
    """Return how many tensors a list gets: one in each turn of its loop, or as many as it has places.

    ``None`` where that is not known before the step runs.
    """
    begins = one.begins
    if table.types[begins] == FROM_TENSOR:
        read = table.inputs[begins][0]
        dims = outputs[read.node][read.index].dims
        return dims[0] if dims and dims[0] >= 0 else None
    if table.types[begins] not in EMPTY:
        return None
    if table.types[one.fills] == PUSH:
        return count_turns(table, table.frame[one.fills])
    places = constant(table, table.inputs[begins][1])
    return None if places is None or places < 0 else int(places)


def list_bytes(table: NodeTable, outputs: Sequence[Sequence[Output]]) -> Mapping[Source, int]:
    """Return the bytes of the lists of a graph, by the output that hands each on, as far as known.

    A tensor that lives outside of the loop, such as a variable, is in a list for nothing. So are those that a
    turn gets from the turn before, but for the first, where that has put them into a list.
    """
    found: dict[Source, int] = {}
    for node, op_type in enumerate(table.types):
        if op_type in EMPTY:
            found[Source(node, 0)] = 0
        elif op_type in (FROM_TENSOR, STACK):
            # What is stacked at last counts for a list that a loop fills in another way than by one op.
            read, made = table.inputs[node][0], Source(node, 0)
            whole, of_list = (read, made) if op_type == FROM_TENSOR else (made, handed_on(table, read))
            output = outputs[whole.node][whole.index]
            total, count = size_of(output), (output.dims or (0,))[0]
            if total is not None and count > 0:
                found[of_list] = count * round_up(total // count)
    for node, op_type in enumerate(table.types):
        if op_type == ZEROS and outputs[node][0].dtype == VARIANT:
            like = read_only_list(table, table.inputs[node][0])
            if like is not None and Source(like, 0) in found:
                found[Source(node, 0)] = found[Source(like, 0)]
    lists = [*find_lists(table)]
    held = {_root(table, one.element) for one in lists}
    for one in lists:
        length, nbytes = list_length(table, outputs, one), element_bytes(table, outputs, one)
        if length is not None and nbytes is not None:
            count = 1 if _left_before(table, one.element) in held else length
            found |= dict.fromkeys((Source(end, 0) for end in one.exits), count * nbytes)
    return found


def element_bytes(table: NodeTable, outputs: Sequence[Sequence[Output]], one: LoopList) -> int | None:
    """Return the bytes that each tensor of a list takes; ``None`` where its size is open."""
    output = outputs[one.element.node][one.element.index]
    if not item_bytes(output.dtype):
        return None
    if lives_outside(table, one.element):
        return 0
    nbytes = size_of(output)
    return None if nbytes is None else round_up(nbytes)


def lives_outside(table: NodeTable, source: Source) -> bool:
    """Tell whether a tensor within a loop is one that lives outside of it."""
    op_type = table.types[_root(table, source).node]
    return op_type in OUTSIDE_TYPES or op_type in ENTERS


def _left_before(table: NodeTable, source: Source) -> Source | None:
    """Return what the turn before has made, if a tensor is what a turn gets from it."""
    split = _root(table, source)
    if table.types[split.node] not in SWITCHES:
        return None
    turning = table.inputs[table.inputs[split.node][0].node]
    nexts = [one.node for one in turning if table.types[one.node] in TURNS]
    return _root(table, table.inputs[nexts[0]][0]) if nexts else None


def _root(table: NodeTable, source: Source) -> Source:
    """Return the output whose memory a tensor is."""
    while table.types[source.node] in ALIAS_TYPES:
        source = table.inputs[source.node][0]
    return source


def count_turns(table: NodeTable, frame: int) -> int | None:
    """Return the turns of a loop that goes on until a counter, or the first of some, is at a constant.

    ``None`` where its condition is another one: what depends on data may end a loop at any time.
    """
    for node, op_type in enumerate(table.types):
        if op_type == "LoopCond" and table.frame[node] == frame:
            return _turns(table, table.inputs[node][0])
    return None


def _turns(table: NodeTable, condition: Source) -> int | None:
    node = handed_on(table, condition).node
    if table.types[node] == "LogicalAnd":
        known = [_turns(table, source) for source in table.inputs[node]]
        return None if None in known else min(one or 0 for one in known)
    if table.types[node] not in COMPARISONS:
        return None
    upwards, reaches = COMPARISONS[table.types[node]]
    one, other = table.inputs[node]
    for counter, end, direction in ((one, other, upwards), (other, one, -upwards)):
        limit, counted = constant(table, end), _counted(table, handed_on(table, counter).node)
        if limit is not None and counted is not None:
            begin, step = counted
            if not (begin.is_integer() and step.is_integer()):  # sums of fractions hang on their rounding
                return None
            turns = (limit - begin) / step
            return (
                max(0, math.floor(turns) + 1 if reaches else math.ceil(turns))
                if step * direction > 0
                else None
            )
    return None


def _counted(table: NodeTable, merge: int) -> tuple[float, float] | None:
    """Return with what a value begins that turns in a loop, and what each turn adds to it."""
    if table.types[merge] not in MERGES:
        return None
    begin = step = None
    for source in table.inputs[merge]:
        if table.types[source.node] in ENTERS:
            begin = constant(table, source)
        elif table.types[source.node] in TURNS:
            step = _step(table, merge, table.inputs[source.node][0])
    return None if begin is None or step is None else (begin, step)


def _step(table: NodeTable, merge: int, left: Source) -> float | None:
    """Return the constant that a turn adds to the value of ``merge``; ``None`` where it does more."""
    node = handed_on(table, left).node
    if table.types[node] == SUBTRACTS:
        value, taken = table.inputs[node]
        step = constant(table, taken)
        return -step if _is_value_of(table, value, merge) and step else None
    if table.types[node] not in ADDS:
        return None
    for value, added in (table.inputs[node], table.inputs[node][::-1]):
        step = constant(table, added)
        if _is_value_of(table, value, merge) and step:
            return step
    return None


def constant(table: NodeTable, source: Source) -> float | None:
    """Return the number that an output is, also where a loop reads it; ``None`` for what is no constant."""
    node = handed_on(table, source).node
    while table.types[node] in ENTERS | MERGES | SWITCHES:
        outer = _kept(table, node) if table.types[node] in MERGES else table.inputs[node][0]
        if outer is None:
            return None
        node = handed_on(table, outer).node
    if table.types[node] not in CONSTANTS:
        return None
    value = tf.make_ndarray(table.nodes[node].attr["value"].tensor)
    return float(value) if value.size == 1 and value.dtype.kind in "iuf" else None


def _kept(table: NodeTable, merge: int) -> Source | None:
    """Return what a value of a loop begins with, where each turn leaves it as it was."""
    begins = None
    if not any(table.types[source.node] in TURNS for source in table.inputs[merge]):
        return None  # it joins the branches of a condition
    for source in table.inputs[merge]:
        if table.types[source.node] not in TURNS:
            begins = source
        elif not _is_value_of(table, table.inputs[source.node][0], merge):
            return None
    return begins


def _is_value_of(table: NodeTable, source: Source, merge: int) -> bool:
    """Tell whether an output within a turn is the value of ``merge`` with which the turn began."""
    split = handed_on(table, source)
    is_own = table.types[split.node] in SWITCHES and table.inputs[split.node][0].node == merge
    return is_own and split.index == 1


def handed_on(table: NodeTable, source: Source) -> Source:
    """Return the output that an op hands on with nothing done to it, or the output itself."""
    while table.types[source.node] == "Identity":
        source = table.inputs[source.node][0]
    return source
