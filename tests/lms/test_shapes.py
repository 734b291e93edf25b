"""Open shapes, completed from what a session feeds or from what TensorFlow leaves open for good."""

from typing import Any

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")

from lms.config import LMSConfig  # noqa: E402
from lms.inline import Call  # noqa: E402
from lms.session import feed_hints  # noqa: E402
from lms.shapes import ShapeHints, complete_shapes, gone_through_batch_size  # noqa: E402
from lms.tf_graph import read_graph  # noqa: E402

pytestmark = pytest.mark.tensorflow

v1 = tf.compat.v1


def two_placeholders() -> tuple[Any, Any, Any]:
    """Two arguments of one rank, told apart by their names alone."""
    graph = tf.Graph()
    with graph.as_default():
        x = v1.placeholder(tf.float32, (None, None), name="x")
        y = v1.placeholder_with_default(tf.zeros((1, 5)), (None, None), name="y")
        tf.exp(x, name="of_x")
        tf.exp(y, name="of_y")
    return graph, x, y


def test_a_feed_belongs_to_its_placeholder_in_whatever_order() -> None:
    graph, x, y = two_placeholders()
    wanted = {"of_x:0": (32, 7), "of_y:0": (32, 10)}
    values = np.zeros((32, 7)), [[0.0] * 10] * 32
    for feeds in (
        {x: values[0], y: values[1]},
        {y: values[1], x: values[0]},
        {"y:0": values[1], x: values[0]},
    ):
        shapes = complete_shapes(graph, feed_hints(graph, feeds, LMSConfig()))
        assert {name: shapes[name] for name in wanted} == wanted


def test_a_placeholder_that_is_not_fed_stays_open() -> None:
    graph, _, y = two_placeholders()
    strange = {"no such name": 1, object(): 2, y: np.zeros((32, 10))}
    shapes = complete_shapes(graph, feed_hints(graph, strange, LMSConfig()))
    assert shapes["of_x:0"] == (None, None) and shapes["of_y:0"] == (32, 10)


def test_a_configured_batch_size_comes_before_the_first_feed() -> None:
    graph, x, _ = two_placeholders()
    shapes = complete_shapes(graph, feed_hints(graph, {x: np.zeros((2, 7))}, LMSConfig(batch_size=64)))
    assert shapes["of_x:0"] == (64, None)


def test_a_feed_that_does_not_fit_is_left_to_tensorflow_to_refuse() -> None:
    graph, x, _ = two_placeholders()
    shapes = complete_shapes(graph, feed_hints(graph, {x: np.zeros((2, 7, 1))}, LMSConfig()))
    assert shapes["of_x:0"] == (None, None)


def test_what_batch_normalisation_leaves_open_for_good_is_nothing() -> None:
    graph = tf.Graph()
    with graph.as_default():
        images, scale = tf.zeros((2, 4, 4, 3)), tf.ones(3)
        made = v1.nn.fused_batch_norm(images, scale, scale, is_training=True)
        note = made[0].op.outputs[5]
        tf.raw_ops.ZerosLike(x=note, name="nothing")
        tf.boolean_mask(images, images > 0, name="chosen")
    assert not note.shape.is_fully_defined()
    shapes = complete_shapes(graph, ShapeHints())
    open_sizes = read_graph(graph, "CPU", shapes).unknown
    assert shapes["nothing:0"] == (0,)
    assert open_sizes and not any(name.startswith("nothing") for name in open_sizes)


def test_weights_of_one_shape_decide_shapes_like_weights_of_their_own() -> None:
    graph = tf.Graph()
    with graph.as_default():
        x = v1.placeholder(tf.float32, (None, 3), name="x")
        square, other, wide = (tf.exp(tf.zeros(shape)) for shape in ((3, 3), (3, 3), (3, 5)))
        double = tf.exp(tf.zeros((3, 5), tf.float64))
        once = tf.matmul(x, square, name="once")
        tf.matmul(tf.matmul(once, other), wide, name="twice")
        tf.matmul(tf.cast(once, tf.float64), double, name="double")
    shapes = complete_shapes(graph, ShapeHints(batch_size=8))
    assert shapes["once:0"] == (8, 3)
    assert shapes["twice:0"] == shapes["double:0"] == (8, 5)


def test_what_an_iterator_gives_takes_the_shapes_of_its_batch_in_turn() -> None:
    spec = tf.TensorSpec((None, None), tf.float32)

    def step(iterator: Any) -> Any:
        first, second = next(iterator)
        return tf.matmul(first, second, transpose_b=True, name="product")

    dataset = tf.data.Dataset.from_generator(lambda: iter(()), output_signature=(spec, spec))
    graph = tf.function(step).get_concrete_function(iter(dataset)).graph
    shapes = complete_shapes(graph, ShapeHints(((8, 5), (3, 5)), 8))
    assert shapes["product:0"] == (8, 3)


def rows(count: int = 40) -> Any:
    return tf.data.Dataset.from_tensor_slices(tf.zeros((count, 3)))


def as_it_is(batch: Any) -> Any:
    return batch


KEEPING = {
    "plain": lambda: rows().batch(16),
    "padded": lambda: rows().padded_batch(16),
    "in parallel": lambda: rows().batch(16, num_parallel_calls=2),
    "order": lambda: rows().batch(8).unbatch().batch(16).shuffle(4).repeat().take(9).cache().prefetch(2),
    "map": lambda: rows().batch(16).map(lambda batch: (batch * 2, tf.reduce_sum(batch, 1))),
    "parallel map": lambda: rows().batch(16).map(as_it_is, num_parallel_calls=2).map(as_it_is),
    "map and batch": lambda: rows().batch(4).apply(tf.data.experimental.map_and_batch(as_it_is, 16)),
    "filter": lambda: rows().batch(16).filter(lambda batch: tf.size(batch) > 3),
}
"""Pipelines whose batches have 16 rows."""

UNKNOWN = {
    "not batched": rows,
    "unbatched": lambda: rows().batch(16).unbatch(),
    "twice the rows": lambda: rows().batch(16).map(lambda batch: tf.concat([batch, batch], 0)),
    "one output": lambda: rows().batch(16).map(lambda batch: (batch, batch[:2])),
    "the data decides": lambda: rows().batch(16).map(lambda batch: tf.boolean_mask(batch, batch[:, 0] > 0)),
    "python decides": lambda: rows().batch(16).map(lambda x: tf.numpy_function(as_it_is, [x], tf.float32)),
    "made of batches": lambda: rows().batch(16).flat_map(tf.data.Dataset.from_tensors),
    "by length": lambda: rows().bucket_by_sequence_length(lambda row: tf.size(row), [2], [16, 8]),
    "rebatched": lambda: rows().batch(16).rebatch([4, 12]),
    "of two": lambda: tf.data.Dataset.zip(rows().batch(16), rows().batch(16)),
    "one by one": lambda: rows().batch(16).concatenate(rows().batch(8)),
}


@pytest.mark.parametrize("name", KEEPING)
def test_the_batches_of_a_dataset_that_a_function_goes_through_have_a_size(name: str) -> None:
    assert gone_through_batch_size([KEEPING[name]()]) == 16


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_size_that_is_not_certain_is_none(name: str) -> None:
    assert gone_through_batch_size([UNKNOWN[name]()]) is None


def test_datasets_of_different_sizes_give_none_and_are_not_looked_into() -> None:
    taken: list[int] = []

    def give() -> Any:
        taken.append(1)
        yield tf.zeros(3)

    watched = tf.data.Dataset.from_generator(give, output_signature=tf.TensorSpec((3,))).batch(16)
    assert Call(((watched,), {"again": watched.prefetch(1)})).hints().batch_size == 16
    assert Call(((watched,), {"other": rows().batch(8)})).hints().batch_size is None
    assert Call(((watched, rows()), {})).hints().batch_size is None
    assert not taken
