"""Moves a constant factor into a product, as Grappler does, where the edges of a plan would keep it outside.

Of ``c * (x * y)`` Grappler makes ``x * (c * y)``, so that constants meet (``ConstantPushDown``), also where
others wait for the inner product, as a gradient function has its ops wait for the gradient that it gets. No
edge of a plan can lead round such a product; moved before, nothing is left to do. With arithmetic rewrites on
Grappler goes on from there, in ways that depend on all of the tree, so there nothing is moved.

Source: ``constant_folding.cc`` of TensorFlow.
"""

from typing import Any

import tensorflow as tf
from tensorflow.python.framework.func_graph import FuncGraph

from lms.equal_terms import Redirected, redirect
from lms.grappler import folds_constants_alone
from lms.step import is_stateful

PRECISE = (tf.float32, tf.float64)
"""With fewer digits Grappler leaves products as they are."""


def move_constants(tf_graph: Any) -> Redirected:
    """Move the constants of such products of a function that is not edited yet.

    Returns:
        What :func:`lms.equal_terms.undo` needs to put it back.
    """
    changed: Redirected = []
    if not isinstance(tf_graph, FuncGraph) or not folds_constants_alone():
        return changed
    for op in tf_graph.get_operations():
        if op.type == "Mul" and op.outputs[0].dtype in PRECISE and (inner := _waited_for(op)) is not None:
            (constant,) = (tensor for tensor in op.inputs if tensor.op.type == "Const")
            first, second = inner.inputs
            with tf_graph.as_default(), tf.control_dependencies(None), tf_graph.name_scope(None):
                scaled = _product(constant, second, inner)
                changed += redirect(inner, scaled) + redirect(op, _product(first, scaled.outputs[0], op))
    return changed


def _product(left: Any, right: Any, like: Any) -> Any:
    with tf.device(like.device or None):
        return tf.raw_ops.Mul(x=left, y=right, name=f"{like.name}/moved").op


def _waited_for(op: Any) -> Any:
    """The product that ``op`` alone reads beside a constant, if ops without effect wait for it."""
    kinds = [tensor.op.type for tensor in op.inputs]
    if sorted(kinds) != ["Const", "Mul"]:
        return None
    inner = op.inputs[kinds.index("Mul")].op
    waiting = inner._control_outputs
    if not waiting or inner.control_inputs or any(is_stateful(one.type) for one in waiting):
        return None
    alone = inner.outputs[0].consumers() == [op]
    known = any(tensor.op.type == "Const" for tensor in inner.inputs)
    shapes = {str(tensor.shape) for tensor in (*inner.inputs, inner.outputs[0])}
    return inner if alone and not known and len(shapes) == 1 else None
