"""Open shapes, completed from what a session feeds or from what TensorFlow leaves open for good."""

from typing import Any

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")

from lms.config import LMSConfig  # noqa: E402
from lms.session import feed_hints  # noqa: E402
from lms.shapes import ShapeHints, complete_shapes  # noqa: E402
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
