"""Have values that eager code gives to variables go to host memory, where a variable's values lie there.

All of it comes through one function of TensorFlow's, which two modules know: the first value, ``assign``,
``load_weights``, the restoring of a checkpoint. What a step assigns is the step's own
(:mod:`lms.rewriter.streaming`).

A variable that is made while a step is traced, and outside of its graph, is made by another class than one
that eager code makes: so are the slots of tf_keras's optimizers, all of which the first step makes.
"""

import threading
from collections.abc import Callable
from functools import wraps
from typing import Any

import tensorflow as tf
from tensorflow.python.eager.polymorphic_function import polymorphic_function
from tensorflow.python.ops import gen_resource_variable_ops, resource_variable_ops

from lms.variables.handles import value_shape, value_type
from lms.variables.on_host import HostVariables

KNOW_ASSIGN = (gen_resource_variable_ops, resource_variable_ops)
MAKERS = (
    (resource_variable_ops.ResourceVariable, "_init_from_args"),
    (polymorphic_function.UnliftedInitializerVariable, "__init__"),
)


class _Making(threading.local):
    trainable: bool | None = None
    """Of the variable that this thread is making."""


class VariableValues:
    """Watches the values that variables get outside of steps.

    Args:
        host: Where the values of some lie.
    """

    def __init__(self, host: HostVariables) -> None:
        self._host, self._making = host, _Making()
        self._assign: Any = None
        self._makers: list[tuple[type, str, Any]] = []
        """What makes variables: a class, the name of the method, and TensorFlow's own one."""

    def install(self) -> None:
        """Begin to watch, if any variables' values may lie in host memory."""
        if not self._host.may_stream or self._assign is not None:
            return
        self._assign = gen_resource_variable_ops.assign_variable_op
        watch = self

        @wraps(self._assign)
        def assign_variable_op(resource: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
            if watch._is_kept(resource):
                with tf.device("CPU:0"):
                    made = tf.convert_to_tensor(value)
                fits = value_shape(resource).is_compatible_with(made.shape)
                if fits and made.dtype == value_type(resource) and watch._offer(resource, made):
                    return None
            elif watch._may_share(resource, value):
                return watch._host.own(resource, value)
            return watch._assign(resource, value, *args, **kwargs)

        for module in KNOW_ASSIGN:
            module.assign_variable_op = assign_variable_op
        for kind, name in MAKERS:
            self._makers.append((kind, name, getattr(kind, name)))
            setattr(kind, name, self._watched(getattr(kind, name)))

    def _watched(self, make: Callable[..., None]) -> Callable[..., None]:
        """Return a method that makes a variable, during which it is known whether that is trainable."""
        making = self._making

        @wraps(make)
        def made(variable: Any, *args: Any, **given: Any) -> None:
            before, making.trainable = making.trainable, given.get("trainable") is not False
            try:
                make(variable, *args, **given)
            finally:
                making.trainable = before

        return made

    def uninstall(self) -> None:
        """Put TensorFlow's own functions back."""
        if self._assign is not None:
            for module in KNOW_ASSIGN:
                module.assign_variable_op = self._assign
            for kind, name, make in self._makers:
                setattr(kind, name, make)
            self._assign, self._makers = None, []

    def _may_share(self, handle: Any, value: Any) -> bool:
        """Tell whether a value is perhaps that of another variable, in host memory."""
        if not (tf.executing_eagerly() and hasattr(handle, "numpy") and hasattr(value, "numpy")):
            return False
        fits = value_shape(handle).is_compatible_with(value.shape) and value.dtype == value_type(handle)
        return fits and self._host.may_share(handle)

    def _offer(self, handle: Any, value: Any) -> bool:
        return self._host.offer(handle, value, trainable=self._making.trainable is not False)

    def _is_kept(self, handle: Any) -> bool:
        """Tell whether a value that eager code gives to a variable belongs in host memory."""
        if not tf.executing_eagerly() or not hasattr(handle, "numpy"):
            return False
        trainable = self._making.trainable
        return self._host.holds(handle) or (
            trainable is not None and self._host.wants_new(handle, trainable=trainable)
        )
