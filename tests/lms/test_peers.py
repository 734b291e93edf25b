"""Which steps may have reached other ranks."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("tensorflow")
import tensorflow as tf

from lms.peers import may_reach_peers

pytestmark = pytest.mark.tensorflow


def graph_of(function: Any) -> Any:
    return tf.function(function).get_concrete_function(tf.TensorSpec([4])).graph


def plain(x: Any) -> Any:
    return tf.nn.relu(x)


def python(x: Any) -> Any:
    return tf.py_function(lambda value: value, [x], tf.float32)


def hidden(x: Any) -> Any:
    return tf.cond(tf.reduce_sum(x) > 0, lambda: python(x), lambda: x)


def without_effects(x: Any) -> Any:
    return tf.numpy_function(lambda value: value, [x], tf.float32, stateful=False)


@pytest.mark.parametrize(
    ("step", "reaches"), [(plain, False), (python, True), (hidden, True), (without_effects, False)]
)
def test_python_code_is_unknown_where_there_are_peers(
    step: Any, reaches: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "horovod.tensorflow", raising=False)
    assert not may_reach_peers(graph_of(step)), "alone there is nobody to reach"
    for size, expected in ((1, False), (2, reaches)):
        horovod = SimpleNamespace(is_initialized=lambda: True, size=lambda size=size: size)
        monkeypatch.setitem(sys.modules, "horovod.tensorflow", horovod)  # type: ignore[arg-type]
        assert may_reach_peers(graph_of(step)) == expected
