"""Results that TensorFlow keeps as constants are no memory of the step."""

from typing import Any

import pytest

tf = pytest.importorskip("tensorflow")

from lms.constants import find_constants  # noqa: E402
from lms.tf_graph import read_graph  # noqa: E402

pytestmark = pytest.mark.tensorflow

ROWS = (64, 1024)
NBYTES = 64 * 1024 * 4


def constants_of(step: Any, shape: tuple[int | None, ...] = ROWS) -> tuple[int, set[str]]:
    """Their bytes but for small ones, and the names of the ops that are left to the step."""
    traced = tf.function(step).get_concrete_function(tf.TensorSpec(shape, tf.float32))
    view = read_graph(traced.graph, "CPU")
    found = find_constants(view.graph, view.ops)
    left = {
        op.name for op in found.graph.ops if any(not found.graph.tensors[out].outside for out in op.outputs)
    }
    return found.nbytes // NBYTES * NBYTES, left


def test_zeros_of_a_known_shape_are_kept() -> None:
    nbytes, left = constants_of(lambda x: tf.where(x > 0, x, tf.zeros_like(x, name="zeros")))
    assert nbytes == NBYTES
    assert "zeros" not in left


def test_zeros_of_an_open_shape_are_made_in_the_step() -> None:
    nbytes, left = constants_of(lambda x: x * tf.raw_ops.ZerosLike(x=x, name="zeros"), (None, 1024))
    assert nbytes == 0
    assert "zeros" in left


def test_of_a_chain_only_what_the_step_reads_is_kept() -> None:
    def step(x: Any) -> Any:
        return x + tf.negative(tf.fill(tf.shape(x), 2.0), name="minus")

    nbytes, left = constants_of(step)
    assert nbytes == NBYTES
    assert not {"Fill", "Shape", "minus"} & left


def test_large_results_with_several_values_are_made_in_the_step() -> None:
    nbytes, left = constants_of(lambda x: x + tf.range(64.0 * 1024, name="numbers")[:1024])
    assert nbytes == 0
    assert "numbers" in left


def test_random_numbers_are_no_constants() -> None:
    nbytes, left = constants_of(lambda x: x + tf.random.uniform(ROWS, name="random"))
    assert nbytes == 0
    assert any(name.startswith("random") for name in left)


def test_equal_constants_are_one() -> None:
    def step(x: Any) -> Any:
        ones, twos, others = (tf.fill(tf.shape(x), value) for value in (1.0, 2.0, 1.0))
        again = tf.tile(tf.reshape(tf.constant(1.0), (1, 1)), ROWS)
        return (tf.sqrt(x) + ones) * twos + tf.square(x) * others - x / again

    assert constants_of(step)[0] == 2 * NBYTES, "ones and twos"


def test_constants_that_differ_in_an_attribute_alone_are_two() -> None:
    def step(x: Any) -> Any:
        small = tf.reshape(tf.range(32.0 * 32), (32, 32))
        turned, straight = (tf.matmul(small, small, transpose_a=flag) for flag in (True, False))
        return x[:32, :32] + turned, x[:32, :32] + straight, x[32:, :32] + straight

    traced = tf.function(step).get_concrete_function(tf.TensorSpec(ROWS, tf.float32))
    view = read_graph(traced.graph, "CPU")
    assert find_constants(view.graph, view.ops).nbytes // 4096 == 2
