"""What TensorFlow works out when it makes a graph ready, behind the plug-in."""

from collections.abc import Sequence

import pytest

pytest.importorskip("tensorflow")
from tensorflow.core.framework import graph_pb2

from lms.ir.op_traits import FOLDED_BYTES
from lms.reader.folded_constants import find_folded
from lms.reader.node_table import NodeTable

pytestmark = pytest.mark.tensorflow


def folded(nodes: dict[str, Sequence[str]], **nbytes: int) -> tuple[set[str], set[str]]:
    """The names of what is folded and of what is held; ``nodes`` have their type and then their inputs."""
    graph_def = graph_pb2.GraphDef()
    for name, (op_type, *read) in nodes.items():
        graph_def.node.add(name=name, op=op_type, input=read, device="GPU" if name == "gpu" else "CPU")
    table = NodeTable.of(graph_def)
    found = find_folded(table, lambda node: nbytes.get(table.names[node], 4))
    names = table.names
    return {names[node] for node in found.nodes}, {names[node] for node in found.held}


LOSS = {
    "x": ["_Arg"],
    "one": ["Const"],
    "dims": ["Const"],
    "tile": ["Tile", "one", "dims"],
    "mean": ["Mul", "tile", "one", "^x"],
    "grad": ["Mul", "x", "mean"],
}


def test_what_reads_constants_alone_is_folded_whatever_it_waits_for() -> None:
    assert folded(LOSS) == ({"tile", "mean"}, {"mean"})


def test_a_large_result_is_left_to_the_step_with_all_that_it_needs() -> None:
    assert folded(LOSS, mean=FOLDED_BYTES) == ({"tile", "mean"}, {"mean"})
    assert folded(LOSS, mean=FOLDED_BYTES + 1) == (set(), set())
    assert folded({**LOSS, "more": ["Mul", "x", "tile"]}, mean=FOLDED_BYTES + 1) == ({"tile"}, {"tile"})


@pytest.mark.parametrize(
    "node",
    [["RandomUniform", "dims"], ["Switch", "one", "one"], ["Neg", "x"], ["Neg", "gpu"], ["NoSuchOp", "one"]],
)
def test_what_has_an_effect_or_reads_something_else_runs(node: list[str]) -> None:
    assert folded({**LOSS, "gpu": ["Const"], "other": node, "end": ["Mul", "x", "other"]})[1] == {"mean"}
