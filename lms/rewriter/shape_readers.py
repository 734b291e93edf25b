"""Let no op hold a tensor only to tell its shape later on.

A ``Shape`` may wait: scripts of TensorFlow 1 make gradients under ``control_dependencies(UPDATE_OPS)``, and
then each ``Shape`` among them holds its tensor until all averages of the step's normalisations are updated.
What it tells is the same before, so those wait that use it.

The gradient of a concatenation, or of a sum of two shapes, asks one ``ShapeN`` for the shapes of all
operands. It runs when the last of them exists, and the executor keeps what an op reads until then: an operand
that is swapped out meanwhile would stay on the device. So the op keeps the operand alone that comes last, and
ops of ours tell the shapes of the others as soon as these exist. What reads these still waits for the op.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from operator import and_, or_
from typing import Any

from tensorflow.python.framework import op_def_registry

from lms.device.kernels import Kernels
from lms.ir.liveness import positions
from lms.ir.op_traits import MERGES, SHAPE_READERS
from lms.ir.swap_plan import SwapPlan
from lms.optimizer.grappler_item import Output
from lms.reader.node_table import ENTERS, MARK_ATTR, NodeTable, Source, inverted
from lms.reader.op_facts import size_of
from lms.reader.step_reader import RESULTS, Step
from lms.reader.survey import Place
from lms.rewriter.writer import MARK, reference

INFIX = f"/{MARK}/shape_"
"""In the name of each node that tells one shape, behind the op's that told several."""

UNGUARDED = MERGES | ENTERS
"""Types of readers that get no control input: it would belong to another frame, or to both branches."""


def late_shapes(table: NodeTable) -> list[int]:
    """Return the nodes that tell a shape, and hold the tensor for something else that they wait for."""
    return [node for node, kind in enumerate(table.types) if kind in SHAPE_READERS and table.controls[node]]


def tell_at_once(
    table: NodeTable,
    outputs: Sequence[Sequence[Output]],
    place: Place,
    frame: int,
    kept: Collection[str],
    min_bytes: int,
) -> tuple[NodeTable, int]:
    """Have those wait that use a shape, and not the op that tells it.

    Args:
        table: The graph; its NodeDefs are changed.
        outputs: Type and shape of the outputs of each node.
        place: The device that is planned.
        frame: The frame that is planned.
        kept: The names of the nodes that are fed, fetched or run.
        min_bytes: Smaller tensors may be held.

    Returns:
        The new table, and the bytes of the tensors that nothing holds for their shapes any more.
    """
    late = late_shapes(table)
    if not late:
        return table, 0
    here, users = place.holds_each(table), inverted(table.before)
    read: dict[int, dict[Source, int]] = {}
    for node in late:
        sources = [source for source in table.inputs[node] if here[source.node]]
        sizes = {source: size_of(outputs[source.node][source.index]) for source in sources}
        is_large = any(nbytes is None or nbytes >= min_bytes for nbytes in sizes.values())
        is_free = table.frame[node] == frame and table.names[node] not in kept
        is_same = not any(_may_change(table.types[source.node]) for source in table.inputs[node])
        if is_large and is_free and is_same and all(_may_wait(table, user, node) for user in users[node]):
            read[node] = {source: nbytes or 0 for source, nbytes in sizes.items()}
    waits = _lacking(table, read)
    while parted := _parted(table, place.kernels, waits):
        read = {node: sizes for node, sizes in read.items() if parted.isdisjoint(_behind(node, users, read))}
        waits = _lacking(table, read)
    held = {source: nbytes for sizes in read.values() for source, nbytes in sizes.items()}
    return table.without_waits(read).add_waits(waits), sum(held.values())


def _may_change(op_type: str) -> bool:
    """Tell whether an op's output is a reference, whose shape another op may change, or nobody knows."""
    definition = op_def_registry.get(op_type)
    return definition is None or any(one.is_ref for one in definition.output_arg)


def _may_wait(table: NodeTable, user: int, node: int) -> bool:
    """Tell whether a node may wait for what another one waits for: in its frame, and on its device."""
    is_beside = table.frame[user] == table.frame[node] and table.devices[user] == table.devices[node]
    return is_beside and table.types[user] not in UNGUARDED | RESULTS


def _parted(table: NodeTable, kernels: Kernels, waits: Collection[tuple[int, int]]) -> set[int]:
    """Return the nodes that TensorFlow would not merge if they waited, or would end the process at."""
    if not waits:
        return set()
    merged = {node for first, second, *_ in kernels.pairs(table) for node in (first, second)}
    controls = [list(one) for one in table.controls]
    for node, other in waits:
        controls[node].append(other)
    waiting = replace(table, controls=[*map(tuple, controls)])
    merged.update({*kernels.fatal(waiting)} - {*kernels.fatal(table)})
    return merged & {node for node, _ in waits}


def _behind(node: int, users: Sequence[Collection[int]], early: Collection[int]) -> set[int]:
    """Return the nodes that use a shape, also through others that are told early."""
    found, pending = set[int](), [node]
    while pending:
        for user in users[pending.pop()]:
            if user not in found:
                found.add(user)
                if user in early:
                    pending.append(user)
    return found


def _lacking(table: NodeTable, early: Collection[int]) -> list[tuple[int, int]]:
    """Return the waits that users of shapes lack once those that tell these wait for nothing.

    Each is to run behind what the ops waited for, and to be left out if one of these is left out. What comes
    behind a ``Merge`` is sure of neither: it runs when one of its inputs has come, and whatever it waits for.
    """
    numbers = sorted({one for node in early for one in table.controls[node]})
    bits = {one: 1 << bit for bit, one in enumerate(numbers)}
    behind, passed = [0] * len(table.nodes), dict.fromkeys(early, 0)
    waits: list[tuple[int, int]] = []
    for node in table.order:
        read = [behind[one.node] | bits.get(one.node, 0) for one in table.inputs[node]]
        is_merge = table.types[node] in MERGES
        found = reduce(and_ if is_merge else or_, read, -1 if is_merge and read else 0)
        before = [one.node for one in table.inputs[node]] + [*table.controls[node]]
        wanted = reduce(or_, (passed.get(one, 0) for one in before), 0)
        if node in passed:
            passed[node] = reduce(or_, (bits[one] for one in table.controls[node]), wanted)
        else:
            for one in () if is_merge else table.controls[node]:
                found |= behind[one] | bits.get(one, 0)
            missing = wanted & ~found
            for other in numbers if missing else ():
                if missing & bits[other] & ~found:
                    waits.append((node, other))
                    found |= behind[other] | bits[other]
        behind[node] = found
    return waits


def leaving(step: Step, plan: SwapPlan, dropped: Collection[int]) -> dict[Source, int]:
    """Return the outputs whose buffers leave the device, with the place in the plan's order behind which.

    Args:
        step: The step that is planned.
        plan: For the step's graph.
        dropped: The buffers of it that are made a second time.
    """
    place, graph = positions(plan.order), step.graph
    gone = {root: place[graph.tensors[root].op] for root in dropped}
    for op in graph.ops:
        for root in {graph.roots[tensor] for tensor in op.inputs} & gone.keys():
            gone[root] = max(gone[root], place[op.id])
    for swap in plan.swaps:
        gone[swap.tensor] = max(place[op] for op in (swap.after, swap.until) if op is not None)
    sources = enumerate(step.sources)
    return {one: gone[graph.roots[tensor]] for tensor, one in sources if one and graph.roots[tensor] in gone}


def part_shapes(graph_def: Any, step: Step, plan: SwapPlan, away: Mapping[Source, int]) -> list[str]:
    """Part the ``ShapeN`` ops that would hold what leaves; return the names of all nodes new or changed.

    An op under a condition stays, and one of which a result is fetched, or leaves the device itself.

    Args:
        graph_def: The graph, which is changed.
        step: Its values, and the nodes behind them.
        plan: Its order tells which operand comes last.
        away: The outputs that leave, each with the place behind which.
    """
    place, table = positions(plan.order), step.table
    comes = {node: place[op] for op, nodes in enumerate(step.members) for node in nodes}
    renamed: dict[str, str] = {}
    changed: list[str] = []
    bound = step.graph.kept.union(swap.tensor for swap in plan.swaps)
    for op in step.graph.ops:
        if op.type == "ShapeN" and not op.conditional and bound.isdisjoint(op.outputs):
            node = step.members[op.id][0]
            places = [comes.get(source.node, -1) for source in table.inputs[node]]
            latest = max(places)
            if any(away.get(source, latest) < latest for source in table.inputs[node]):
                changed += _part(graph_def, table.nodes[node], places.index(latest), renamed)
    for reader in graph_def.node if renamed else ():
        for slot, text in enumerate(reader.input):
            if text in renamed:
                reader.input[slot] = renamed[text]
                wait = f"^{text.partition(':')[0]}"
                if renamed[text] != wait[1:] and wait not in reader.input and reader.op not in UNGUARDED:
                    reader.input.append(wait)
    return changed


def told_before(name: str) -> tuple[str, int] | None:
    """Return the op, and its output, that told what the node ``name`` tells; ``None`` for other nodes."""
    before, _, which = name.rpartition(INFIX)
    return (before, int(which)) if which.isdecimal() else None


def _part(graph_def: Any, node: Any, last: int, renamed: dict[str, str]) -> list[str]:
    """Part one op, note what its outputs are called now, and return the names of its nodes."""
    read = [text for text in node.input if text[0] != "^"]
    waits = [text for text in node.input if text[0] == "^"]
    names = [node.name]
    for slot, text in enumerate(read):
        name = f"{node.name}{INFIX}{slot}"
        renamed[reference(node.name, slot)] = renamed[f"{node.name}:{slot}"] = (
            node.name if slot == last else name
        )
        if slot != last:
            made = graph_def.node.add(name=name, op="Shape", device=node.device, input=[text])
            for key in ("T", "out_type"):
                made.attr[key].CopyFrom(node.attr[key])
            made.attr[MARK_ATTR].s = b"shape"
            names.append(name)
    makers = dict.fromkeys(f"^{text.partition(':')[0]}" for text in read if text != read[last])
    del node.input[:]
    node.input.extend([read[last], *dict.fromkeys([*waits, *makers])])
    node.attr["N"].i = 1
    node.attr[MARK_ATTR].s = b"shape"
    return names
