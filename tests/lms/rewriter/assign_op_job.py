"""Calls the op that assigns in place on variables of every kind; prints what it saw as JSON."""

import json
import os
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("TF_CPU_ALLOCATOR_USE_BFC", "true")

import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

from lms.native.build import ASSIGN  # noqa: E402
from lms.native.library import load_library  # noqa: E402
from lms.variables.memory import address_of  # noqa: E402

assign = load_library(ASSIGN, os.environ).ops.lms_assign
LONG, SHORT = tf.constant(np.arange(4096.0), tf.float32), tf.ones((1024,))


def variable(shape: Any = None) -> Any:
    """A variable of 4,096 zeros."""
    return tf.Variable(tf.zeros(LONG.shape), shape=shape)


def place(one: Any) -> int | None:
    """Where its value lies."""
    return address_of(tf.raw_ops.ReadVariableOp(resource=one.handle, dtype=one.dtype))


def stays(one: Any, value: Any, **options: Any) -> bool:
    """Assign, check the value, and tell whether it lies where the old one lay."""
    before = place(one)
    assign(resource=one.handle, value=value, **options)
    assert np.array_equal(one.numpy(), value.numpy()), "the value"
    return before is not None and place(one) == before


def refused(one: Any, value: Any, **options: Any) -> str:
    """The error of an assignment, which leaves the variable as it is."""
    before = one.numpy().copy()
    try:
        assign(resource=one.handle, value=value, **options)
    except tf.errors.InvalidArgumentError as error:
        assert np.array_equal(one.numpy(), before)
        return str(error.message)
    return ""


def held() -> list[bool]:
    """Somebody holds the old value, and then another variable has the buffer, too."""
    one, other = variable(), variable()
    old = tf.raw_ops.ReadVariableOp(resource=one.handle, dtype=tf.float32)
    moved = not stays(one, LONG)
    assert not old.numpy().any(), "what was held has changed"
    tf.raw_ops.AssignVariableOp(resource=other.handle, value=one.read_value())
    shared = stays(one, LONG * 2)
    assert np.array_equal(other.numpy(), LONG.numpy())
    return [moved, shared]


def rows() -> list[Any]:
    """Ops on rows have what is read copied; the variable's buffer stays its own, where it moves, too."""
    one = variable((None,))
    at, more = tf.constant([0]), tf.constant([5.0])
    tf.raw_ops.ResourceScatterUpdate(resource=one.handle, indices=at, updates=more)
    assign(resource=one.handle, value=LONG)
    kept = bool(np.array_equal(one.numpy(), LONG.numpy()))
    value = SHORT * 3
    assign(resource=one.handle, value=value)
    tf.raw_ops.ResourceScatterUpdate(resource=one.handle, indices=at, updates=more)
    return [kept, float(value[0]), float(one.numpy()[0])]


def fresh() -> bool:
    """A variable without a value gets one."""
    handle = tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[4096], shared_name="fresh")
    assign(resource=handle, value=LONG)
    made = tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float32)
    return bool(np.array_equal(made.numpy(), LONG.numpy()))


def empty() -> bool:
    """Nothing is copied."""
    one = tf.Variable(tf.zeros((0, 3)))
    assign(resource=one.handle, value=tf.zeros((0, 3)))
    return one.numpy().shape == (0, 3)


found = {
    "plain": stays(variable(), LONG),
    "shape": stays(variable((None,)), SHORT),
    "integers": stays(tf.Variable(tf.zeros((8,), tf.int64)), tf.range(8, dtype=tf.int64)),
    "validated": refused(variable((None,)), SHORT, validate_shape=True),
    "type": refused(variable(), tf.zeros(LONG.shape, tf.int32)),
    "held": held(),
    "rows": rows(),
    "fresh": fresh(),
    "empty": empty(),
}
print(json.dumps(found))
