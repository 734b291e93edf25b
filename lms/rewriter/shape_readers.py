"""Let no op hold a tensor that has left only to tell its shape later on.

The gradient of a concatenation, or of a sum of two shapes, asks one ``ShapeN`` for the shapes of all
operands. It runs when the last of them exists, and the executor keeps what an op reads until then: an operand
that is swapped out meanwhile would stay on the device. So the op keeps the operand alone that comes last, and
ops of ours tell the shapes of the others as soon as these exist. What reads these still waits for the op.
"""

from collections.abc import Collection, Mapping
from typing import Any

from lms.ir.liveness import positions
from lms.ir.op_traits import MERGES
from lms.ir.swap_plan import SwapPlan
from lms.reader.node_table import ENTERS, MARK_ATTR, Source
from lms.reader.step_reader import Step
from lms.rewriter.writer import MARK, reference

INFIX = f"/{MARK}/shape_"
"""In the name of each node that tells one shape, behind the op's that told several."""

UNGUARDED = MERGES | ENTERS
"""Types of readers that get no control input: it would belong to another frame, or to both branches."""


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
