"""Let no op hold a tensor that has left only to tell its shape later on.

The gradient of a concatenation, or of a sum of two shapes, asks one ``ShapeN`` for the shapes of all
operands. It runs when the last of them exists, and the executor keeps what an op reads until then: an operand
that is swapped out meanwhile would stay on the device. So the op keeps the operand alone that comes last, and
ops of ours tell the shapes of the others as soon as these exist.
"""

from collections.abc import Collection
from typing import Any

from lms.ir.liveness import positions
from lms.ir.swap_plan import SwapPlan
from lms.reader.node_table import MARK_ATTR, Source
from lms.reader.step_reader import Step
from lms.rewriter.writer import MARK, reference

INFIX = f"/{MARK}/shape_"
"""In the name of each node that tells one shape, behind the op's that told several."""


def leaving(step: Step, plan: SwapPlan, dropped: Collection[int]) -> frozenset[Source]:
    """Return the outputs whose buffers leave the device before the last op that reads them has run.

    Args:
        step: The step that is planned.
        plan: For the step's graph.
        dropped: The buffers of it that are made a second time.
    """
    roots = {swap.tensor for swap in plan.swaps}.union(dropped)
    sources = enumerate(step.sources)
    return frozenset(one for tensor, one in sources if one and step.graph.roots[tensor] in roots)


def part_shapes(graph_def: Any, step: Step, plan: SwapPlan, away: frozenset[Source]) -> list[str]:
    """Part the ``ShapeN`` ops that read what leaves; return the names of all nodes that are new or changed.

    Args:
        graph_def: The graph, which is changed.
        step: Its values, and the nodes behind them.
        plan: Its order tells which operand comes last.
        away: The outputs that leave.
    """
    place, table = positions(plan.order), step.table
    comes = {node: place[op] for op, nodes in enumerate(step.members) for node in nodes}
    renamed: dict[str, str] = {}
    changed: list[str] = []
    for op in step.graph.ops:
        node = step.members[op.id][0] if step.members[op.id] else 0
        if op.type == "ShapeN" and len(table.inputs[node]) > 1 and not away.isdisjoint(table.inputs[node]):
            read = table.inputs[node]
            last = max(range(len(read)), key=lambda slot: comes.get(read[slot].node, -1))
            changed += _part(graph_def, table.nodes[node], last, renamed)
    if renamed:
        for reader in graph_def.node:
            for slot, text in enumerate(reader.input):
                if text in renamed:
                    reader.input[slot] = renamed[text]
    return changed


def told_before(name: str) -> str | None:
    """Return the op that told what the node ``name`` tells, and other shapes; ``None`` for other nodes."""
    before, _, which = name.rpartition(INFIX)
    return before if which.isdecimal() else None


def _part(graph_def: Any, node: Any, last: int, renamed: dict[str, str]) -> list[str]:
    """Part one op, note what its outputs are called now, and return the names of its nodes."""
    read = [text for text in node.input if text[0] != "^"]
    waits = [text for text in node.input if text[0] == "^"]
    names = [node.name]
    for slot, text in enumerate(read):
        name = f"{node.name}{INFIX}{slot}"
        renamed[reference(node.name, slot)] = node.name if slot == last else name
        if slot != last:
            made = graph_def.node.add(name=name, op="Shape", device=node.device, input=[text, *waits])
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
