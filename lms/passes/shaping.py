"""The pass that finds the type and shape of what each node makes."""

from collections.abc import Sequence
from dataclasses import replace

from lms.ir.op_traits import MERGES
from lms.optimizer.grappler_item import Output
from lms.passes.work import Specialised, Work
from lms.reader.node_table import SWITCHES, NodeTable
from lms.reader.shapes import complete_shapes
from lms.rewriter.branches import NUMBER
from lms.rewriter.repeats import repeated_node
from lms.rewriter.shape_readers import told_before


class Shaping:
    """Has TensorFlow infer shapes, and completes them with what the call knows."""

    name = "shapes"

    def requires(self, work: Work) -> bool:
        """Tell whether shapes are not known yet."""
        return work.table is not None and len(work.outputs) < len(work.table.nodes)

    def apply(self, work: Work) -> Work:
        """Add the type and shape of each node's outputs."""
        assert work.table is not None  # noqa: S101 - Parsing went before
        if work.outputs:
            return replace(work, outputs=with_added(work.table, work.outputs))
        inferred = work.task.request.item.output_properties(work.table.names)
        outputs = with_specialised(work.table, inferred, work.task.specialised)
        completed = complete_shapes(work.graph_def, work.table, outputs, work.task.hints)
        return replace(work, outputs=completed)


def with_specialised(
    table: NodeTable, outputs: Sequence[list[Output]], made: Specialised
) -> Sequence[list[Output]]:
    """Extend the outputs that TensorFlow infers for a graph to what it has become."""
    if not made.outputs and not made.like:
        return outputs
    known = [made.outputs.get(name, told) for name, told in zip(table.names, outputs, strict=True)]
    for name, text in made.like.items():
        if name in table.number:
            source, _, index = text.partition(":")
            known[table.number[name]] = [known[table.number[source]][int(index or 0)]]
    return known


def with_added(table: NodeTable, outputs: Sequence[Sequence[Output]]) -> Sequence[Sequence[Output]]:
    """Extend a graph's outputs to the nodes that an edit has added.

    These nodes repeat another one, tell the shape of what they read as another one did, or pass it on. A
    constant is what a node reads that runs whether a condition leaves others out or not.
    """
    known = [*outputs, *([()] * (len(table.nodes) - len(outputs)))]
    for node in table.order:
        if node >= len(outputs):
            if (same := repeated_node(table.names[node])) is not None:
                known[node] = known[table.number[same]]
                continue
            if (told := told_before(table.names[node])) is not None:
                known[node] = [known[table.number[told[0]]][told[1]]]
                continue
            read = [known[source.node][source.index] for source in table.inputs[node]]
            if table.types[node] in SWITCHES | MERGES:
                attr = table.nodes[node].attr  # to ask for one that is not there adds it, without a value
                known[node] = read[:1] * (attr["num_outs"].i if "num_outs" in attr else 2)
            elif table.types[node] == "Const":
                known[node] = [NUMBER]
            else:
                known[node] = read if table.types[node] == "IdentityN" else read[:1]
    return known
