"""How the inputs of nodes are read, and in which order nodes stand."""

from typing import Any, NamedTuple

import pytest

from lms.errors import UnreadableError
from lms.reader.node_table import NodeTable, OutputNames, Source, topological_order


class Node(NamedTuple):
    """As much of a NodeDef as a table reads."""

    name: str
    input: tuple[str, ...] = ()
    op: str = "Identity"
    device: str = ""
    attr: Any = {}  # noqa: RUF012 - never changed


class Graph(NamedTuple):
    node: tuple[Node, ...]


def test_an_input_names_an_output_of_a_node() -> None:
    names = OutputNames.of(["a", "b/c"])
    assert (names["a"], names["b/c:0"], names["b/c:12"]) == (Source(0, 0), Source(1, 0), Source(1, 12))
    for missing in ("", "c", "b:1", ":1"):
        with pytest.raises(KeyError):
            names[missing]


def test_a_table_holds_what_nodes_read_and_wait_for() -> None:
    graph = Graph((Node("sum", ("a", "b:1", "^a")), Node("a", device="CPU"), Node("b", ("^a",), "Split")))
    table = NodeTable.of(graph, fed={"a"})
    assert table.inputs == [(Source(1, 0), Source(2, 1)), (), ()]
    assert table.controls == [(1,), (), (1,)]
    assert table.texts[0] == ("a", "b:1", "^a")
    assert (table.types, table.devices) == (["Identity", "Placeholder", "Split"], ["", "CPU", ""])
    assert table.before == [{1, 2}, set(), {1}]
    assert table.order == [1, 2, 0]
    assert (table.frame, table.marks) == ([0, 0, 0], {})


def test_a_node_that_is_not_there_or_waits_for_itself_is_told() -> None:
    with pytest.raises(UnreadableError, match="reads 'b'"):
        NodeTable.of(Graph((Node("a", ("b",)),)))
    circle = NodeTable.of(Graph((Node("a", ("b",)), Node("b", ("^a",)))))
    with pytest.raises(UnreadableError, match="cycle"):
        circle.order  # noqa: B018 - it is computed when it is asked for


def test_a_merge_does_not_wait_for_the_next_turn() -> None:
    turn = Node("turn", ("merge",), "NextIteration")
    table = NodeTable.of(Graph((Node("first"), turn, Node("merge", ("first", "turn"), "Merge"))))
    assert table.order == [0, 2, 1]


def test_of_what_may_come_next_the_lowest_number_comes() -> None:
    assert topological_order([{3}, set(), {1}, set()]) == [1, 2, 3, 0]
    assert topological_order([set(), {2}, {1}]) == [0], "what is in a cycle is left out"
