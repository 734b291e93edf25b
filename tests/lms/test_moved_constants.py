"""A constant factor is moved into a product that others wait for, where TensorFlow would move it."""

from collections.abc import Iterator
from typing import Any

import pytest

tf = pytest.importorskip("tensorflow")

from lms.equal_terms import undo  # noqa: E402
from lms.moved_constants import move_constants  # noqa: E402

pytestmark = pytest.mark.tensorflow


@pytest.fixture
def folding_alone() -> Iterator[None]:
    """Arithmetic rewrites off."""
    before = tf.config.optimizer.get_experimental_options().get("arithmetic_optimization", True)
    tf.config.optimizer.set_experimental_options({"arithmetic_optimization": False})
    yield
    tf.config.optimizer.set_experimental_options({"arithmetic_optimization": before})


def traced(dtype: Any = tf.float32, *, waited_for: bool = True) -> Any:
    @tf.function
    def slope(x: Any, y: Any) -> Any:
        inner = tf.multiply(x, y, name="inner")
        with tf.control_dependencies([inner] if waited_for else []):
            square = tf.square(x, name="square")
        return tf.multiply(tf.multiply(inner, tf.constant(3.0, dtype), name="outer"), square, name="end")

    return slope.get_concrete_function(*[tf.TensorSpec((4, 4), dtype)] * 2).graph


def factors(graph: Any, name: str) -> list[str]:
    return [tensor.op.name for tensor in graph.get_operation_by_name(name).inputs]


def test_the_constant_goes_to_the_second_factor_and_back_again(folding_alone: None) -> None:
    graph = traced()
    changed = move_constants(graph)
    assert factors(graph, "end") == ["outer/moved", "square"]
    assert factors(graph, "outer/moved") == ["x", "inner/moved"]
    assert factors(graph, "inner/moved") == ["Const", "y"]
    (before,) = graph.get_operation_by_name("square").control_inputs
    assert before.name == "inner/moved"
    undo(changed)
    assert factors(graph, "end") == ["outer", "square"] and factors(graph, "outer") == ["inner", "Const"]
    assert [op.name for op in graph.get_operation_by_name("square").control_inputs] == ["inner"]


def test_products_that_nobody_waits_for_or_of_few_digits_are_left_to_tensorflow(folding_alone: None) -> None:
    assert move_constants(traced(waited_for=False)) == []
    assert move_constants(traced(tf.bfloat16)) == []


def test_with_arithmetic_rewrites_on_nothing_is_moved() -> None:
    assert move_constants(traced()) == []
