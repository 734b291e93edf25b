"""The lists that loops fill, the turns of loops, and loops cut open to infer shapes."""

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("tensorflow")
import tensorflow as tf
from tensorflow.python.ops import control_flow_util

from lms.optimizer.grappler_item import Output
from lms.reader.cut_loops import cut_loops, turns_keep_shapes
from lms.reader.loop_lists import count_turns, find_lists, list_bytes, list_length
from lms.reader.node_table import NodeTable
from lms.reader.shapes import infer

pytestmark = pytest.mark.tensorflow

ROWS = 8


@pytest.fixture(autouse=True)
def frames(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have loops written as TensorFlow's executor runs them."""
    monkeypatch.setattr(control_flow_util, "ENABLE_CONTROL_FLOW_V2", False)


def pushed(
    goes_on: Callable[[Any], Any],
    step: float | Callable[[Any], Any] = 1,
    begin: float = 0,
    what: Callable[..., Any] | None = None,
) -> Any:
    """Return the GraphDef of a loop that pushes a tensor in each turn.

    A turn adds ``step`` to the counter, or calls it for the next one.
    """
    with tf.Graph().as_default() as graph:
        rows = tf.random.uniform((ROWS, 4))
        made = tf.raw_ops.EmptyTensorList(
            element_shape=-1, max_num_elements=100, element_dtype=tf.float32, name="list"
        )

        def turn(i: Any, state: Any, held: Any) -> Any:
            state = tf.sin(state)
            one = state if what is None else what(i, state, rows)
            counted = step(i) if callable(step) else i + step
            return counted, state, tf.raw_ops.TensorListPushBack(input_handle=held, tensor=one)

        _, _, whole = tf.compat.v1.while_loop(lambda i, *_: goes_on(i), turn, (begin, rows, made))
        tf.identity(whole, "end")
        return graph.as_graph_def()


def only_list(graph_def: Any) -> tuple[NodeTable, Any]:
    table = NodeTable.of(graph_def)
    (found,) = find_lists(table)
    return table, found


def shapes(graph_def: Any, table: NodeTable) -> list[list[Output]]:
    known = infer(graph_def, ["end"])
    return [known.get(name, []) for name in table.names]


@pytest.mark.parametrize(
    ("goes_on", "step", "begin", "turns"),
    [
        (lambda i: i < 7, 1, 0, 7),
        (lambda i: i < 7, 2, 1, 3),
        (lambda i: i < 7.5, 1.0, 0.0, 8),
        (lambda i: tf.logical_and(i < 7, i < 5), 1, 0, 5),
        (lambda i: i < 0, 1, 3, 0),
        (lambda i: i <= 7, 1, 0, 8),
        (lambda i: i <= 7, 3, 2, 2),
        (lambda i: i <= 0, 1, 3, 0),
        (lambda i: i > 0, -1, 7, 7),
        (lambda i: i >= 0, -2, 7, 4),
        (lambda i: tf.constant(7) > i, 1, 0, 7),
        (lambda i: tf.constant(0) <= i, lambda i: i - 1, 7, 8),
        (lambda i: i < 7, -1, 0, None),
        (lambda i: i > 0, 1, 7, None),
        (lambda i: i > 0, lambda i: 1 - i, 7, None),
        (lambda i: tf.not_equal(i, 7), 1, 0, None),
        (lambda i: tf.logical_and(i < 7, tf.random.uniform(()) < 0.5), 1, 0, None),
        (lambda i: tf.random.uniform(()) < 0.5, 1, 0, None),
    ],
)
def test_turns_are_counted_where_counters_alone_decide(
    goes_on: Callable[[Any], Any], step: Any, begin: float, turns: int | None
) -> None:
    table, found = only_list(pushed(goes_on, step, begin))
    assert count_turns(table, table.frame[found.fills]) == turns
    assert list_length(table, (), found) == turns


def test_a_list_has_the_bytes_of_its_tensors() -> None:
    graph_def = pushed(lambda i: i < 7)
    table, found = only_list(graph_def)
    sizes = list_bytes(table, shapes(graph_def, table))
    assert {nbytes for source, nbytes in sizes.items() if source.node in found.exits} == {7 * 256}


def test_what_lives_outside_of_the_loop_is_in_a_list_for_nothing() -> None:
    graph_def = pushed(lambda i: i < 7, what=lambda i, state, rows: rows)
    table, found = only_list(graph_def)
    sizes = list_bytes(table, shapes(graph_def, table))
    assert {nbytes for source, nbytes in sizes.items() if source.node in found.exits} == {0}


def cut(graph_def: Any, name: str) -> tuple[Any, bool]:
    """Return the shape of what is pushed in the graph cut open, and whether turns keep their shapes."""
    table, found = only_list(graph_def)
    pushes = table.names[found.element.node]
    turns = cut_loops(graph_def)
    known = infer(graph_def, [name])
    return known[pushes][found.element.index].dims, turns_keep_shapes(turns, known)


def test_a_loop_cut_open_has_the_shapes_of_each_turn() -> None:
    assert cut(pushed(lambda i: i < 7), "end") == ((ROWS, 4), True)


def test_a_size_that_hangs_on_the_turn_is_not_taken_for_that_of_the_first() -> None:
    """Neither where TensorFlow infers shapes of a graph, nor where it builds one."""
    graph_def = pushed(lambda i: i < 7, what=lambda i, state, rows: tf.fill((i + 1, 4), 1.0))
    table, found = only_list(graph_def)
    dims, _ = cut(graph_def, "end")
    assert dims is None or dims[0] < 0
    with tf.Graph().as_default() as built:
        tf.graph_util.import_graph_def(graph_def, name="")
    fill = built.get_operation_by_name(table.names[found.element.node])
    assert fill.outputs[found.element.index].shape.as_list() == [None, 4]


@pytest.mark.parametrize("begin", [0, 2])
def test_a_value_that_grows_is_seen(begin: int) -> None:
    with tf.Graph().as_default() as graph:
        rows = tf.random.uniform((ROWS, 4))
        invariants = tf.TensorShape(()), tf.TensorShape((None, 4))
        _, grown = tf.compat.v1.while_loop(
            lambda i, _: i < 5,
            lambda i, state: (i + 1, tf.concat([state, rows], 0)),
            (0, rows[:begin]),
            invariants,
        )
        tf.identity(grown, "end")
        graph_def = graph.as_graph_def()
    turns = cut_loops(graph_def)
    assert not turns_keep_shapes(turns, infer(graph_def, ["end"]))
