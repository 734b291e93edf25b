"""Edges round what becomes one kernel close no cycle and change no value, whatever its ops share."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")

from detouring import lead_round  # noqa: E402

pytestmark = pytest.mark.tensorflow

VALUE = np.linspace(-1, 1, 16, dtype="f").reshape(4, 4)


def values(make: Callable[[Any], Any], edges: Sequence[tuple[str, str]] = ()) -> Any:
    """What ``make`` computes, with control edges that then go round its groups."""
    graph = tf.Graph()
    with graph.as_default():
        x = tf.compat.v1.placeholder(tf.float32, (4, 4), name="x")
        made = make(x)
    lead_round(graph, graph.get_operations(), edges)
    with tf.compat.v1.Session(graph=graph) as session:
        return session.run(made, {x: VALUE})


def test_an_op_that_waits_for_another_one_of_its_sum_may_read_what_that_reads() -> None:
    def sums(x: Any) -> Any:
        shared = tf.nn.softplus(x, name="shared")
        first = tf.add(shared, tf.nn.softsign(x), name="first")
        second = tf.add(shared, tf.cast(x > 0, tf.float32), name="second")
        return tf.add(first, second, name="both")

    edges = [("shared", "first"), ("first", "second"), ("second", "both")]
    assert (values(sums, edges) == values(sums)).all()


def test_a_group_may_wait_for_what_needs_the_shape_of_one_of_its_ops() -> None:
    def noisy(x: Any) -> Any:
        inner = tf.exp(x, name="inner")
        noise = tf.fill(tf.raw_ops.Shape(input=inner), 2.0, name="noise")
        return tf.tanh(inner, name="outer") * noise

    assert (values(noisy, [("inner", "noise"), ("noise", "outer")]) == values(noisy)).all()


@pytest.mark.parametrize("read_again", [False, True])
def test_a_sigmoid_keeps_a_factor_of_its_own(read_again: bool) -> None:
    def scaled(x: Any) -> Any:
        read = tf.nn.softplus(x)
        product = tf.multiply(read, 3.0, name="product")
        swish = tf.multiply(read, tf.sigmoid(product), name="swish")
        return swish + tf.nn.softsign(product) if read_again else swish

    read = np.log1p(np.exp(VALUE))
    swish = read / (1 + np.exp(-3 * read))
    wanted = swish + 3 * read / (1 + 3 * read) if read_again else swish
    assert np.allclose(values(scaled), wanted, atol=1e-5)


def test_a_sum_of_one_is_a_sum() -> None:
    def single(x: Any) -> Any:
        return tf.raw_ops.AddN(inputs=[tf.matmul(x, x)])

    assert np.allclose(values(single), VALUE @ VALUE)


def test_a_group_may_be_longer_than_a_stack_of_calls() -> None:
    def long(x: Any) -> Any:
        for number in range(1500):
            x = tf.tanh(x, name=f"tanh_{number}")
        return x

    assert (values(long, [("x", "tanh_1499")]) == values(long)).all()
