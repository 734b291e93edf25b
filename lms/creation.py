"""Tells a trace that makes variables, which TensorFlow throws away, from the one that it runs.

A ``tf.function`` that makes variables in its first call, as Keras 3 does for its optimizer, is traced twice.
After the first trace TensorFlow lifts the first values of the variables out of the graph, computes them, and
runs the second trace, which finds the variables made. An edge of ours into a first value would tie it to the
step. TensorFlow then falls back to a condition with both traces in every step, and keeps the first values as
constants beside the variables: 12 MiB more for a MobileNet with RMSprop.

tf_keras makes its optimizer's variables outside of the graph, where they have their values at once.
TensorFlow traces anew all the same, and an edit of the first trace would be made for nothing.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.framework.func_graph import FuncGraph

from lms.handles import outermost

CONDITIONS = ("If", "StatelessIf")
ASKS_WHETHER_MADE = "VarIsInitializedOp"


def is_thrown_away(func_graph: Any, functions: Sequence[Any]) -> bool:
    """Whether a trace makes variables whose first values are there, or can be lifted out of it.

    Args:
        func_graph: What has been traced.
        functions: Those that are traced for the call under way, the outermost first.
    """
    ops = func_graph.get_operations()
    starts = [op for op in ops if op.type in CONDITIONS and op.inputs[0].op.type == ASKS_WHETHER_MADE]
    if not any(_has_no_value(op.inputs[0].op.inputs[0]) for op in starts):
        return bool(functions) and _is_first_of(func_graph, functions[0])
    return all(op.type != "Placeholder" for op in _needed_for(_first_values(starts)))


def _is_first_of(func_graph: Any, function: Any) -> bool:
    """Whether this is the trace of ``function`` itself in which its variables were made.

    Functions within it are traced once for both traces of the outer one, so they are not thrown away.
    """
    is_outermost = not isinstance(func_graph.outer_graph, FuncGraph) and func_graph.name == function._name
    return bool(is_outermost and function._created_variables and not function._no_variable_creation_config)


def _has_no_value(handle: Any) -> bool:
    """Whether the variable behind ``handle`` is still to get its first value."""
    outer = outermost(handle)
    with tf.init_scope():
        if outer is None or not tf.executing_eagerly():
            return False
        return not bool(tf.raw_ops.VarIsInitializedOp(resource=outer))


def _first_values(starts: Iterable[Any]) -> Iterator[Any]:
    """The ops of what the conditions assign: their inputs but for the question and the variable itself."""
    for op in starts:
        yield from (tensor.op for tensor in op.inputs[1:] if tensor.dtype != tf.resource)


def _needed_for(ops: Iterable[Any]) -> set[Any]:
    needed: set[Any] = set()
    waiting = list(ops)
    while waiting:
        op = waiting.pop()
        if op not in needed:
            needed.add(op)
            waiting += [tensor.op for tensor in op.inputs]
            waiting += op.control_inputs
    return needed
