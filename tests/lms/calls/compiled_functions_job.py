"""Copies functions that XLA compiles whole, runs the copies, and prints JSON."""

import gc
import json
import os
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import tensorflow as tf  # noqa: E402
from tensorflow.python.eager import context  # noqa: E402

from lms.calls.compiled_functions import CompiledFunctions  # noqa: E402

weight = tf.Variable(tf.ones((4, 4)))


@tf.function(jit_compile=True)
def train(rows: Any) -> Any:
    """A step with a loop, within a function or alone."""
    with tf.GradientTape() as tape:
        made = rows
        for _ in tf.range(3):
            made = tf.nn.relu(tf.matmul(made, weight) / 4.0)
        loss = tf.reduce_sum(made)
    weight.assign_sub(0.1 * tape.gradient(loss, weight))
    return loss


@tf.function(jit_compile=True)
def look(rows: Any) -> Any:
    """A forward pass."""
    return tf.matmul(rows, weight)


@tf.function
def outer(rows: Any) -> Any:
    """A function that calls one that XLA compiles."""
    return 1.0 + train(rows)


@tf.function
def plain(rows: Any) -> Any:
    """A function that XLA has nothing to do with."""
    return 2.0 * rows


def attributes(name: str) -> list[str]:
    """The attributes of a function and of its nodes that are there for XLA, and those of loops."""
    definition = context.context().get_function_def(name)
    return sorted(
        key
        for attrs in (definition.attr, *(node.attr for node in definition.node_def))
        for key in attrs
        if key in ("_XlaMustCompile", "_noinline", "_lower_using_switch_merge")
    )


def copies() -> int:
    """The number of copies that TensorFlow knows."""
    return sum("without_xla" in name for name in context.context().list_function_names())


def main() -> None:
    """Copy four functions."""
    rows, found = tf.ones((4, 4)), CompiledFunctions()
    made: dict[str, Any] = {}
    for function in (train, look, outer, plain):
        concrete = function.get_concrete_function(rows)
        copy = found.copy_of(concrete.name.decode())
        made[function._name] = None if copy is None else sorted(copy.types)
        if copy is not None:
            weight.assign(tf.ones((4, 4)))
            loss = concrete(rows)
            after = float(tf.reduce_sum(weight))
            weight.assign(tf.ones((4, 4)))
            inputs = [rows, *concrete.captured_inputs]
            again = context.context().call_function(copy.name.encode(), inputs, 1)
            same = [loss, after], [again[0], float(tf.reduce_sum(weight))]
            made[f"{function._name} runs"] = [[float(one) for one in ones] for ones in same]
            made[f"{function._name} attributes"] = attributes(copy.name)
            made[f"{function._name} again"] = found.copy_of(concrete.name.decode()) == copy
    made["copies"] = copies()
    del function, concrete, copy, inputs, again
    for one in ("train", "outer"):
        del globals()[one]
    gc.collect()
    found.copy_of(plain.get_concrete_function(tf.ones((2, 4))).name.decode())
    made["copies at last"] = copies()
    print(json.dumps(made))


main()
