"""Warn of the training steps that LMS does not see, each with the remedy."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import imperative_grad, record
from tensorflow.python.framework import ops as tf_ops

FEWEST_VARIABLES = 4
"""Two layers. A gradient of fewer variables fits a scale or inspects a model, and needs little memory."""

EAGER = (
    "a training step runs in eager execution, where LMS cannot see it and swaps nothing; put the forward "
    "pass, the tape and the optimizer's update into one tf.function (Keras: without run_eagerly=True)"
)


class Unseen:
    """Checks every call of a function, and the gradients of eager code once it is installed.

    Args:
        warn: Warns, of each text once.
        refuse: Is told of each eager step before it trains.
    """

    def __init__(self, warn: Callable[[str], None], refuse: Callable[[str], None]) -> None:
        self._warn, self._refuse = warn, refuse
        self._gradient = imperative_grad.imperative_grad
        self._told_of_tape = False
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()
        """The functions that were looked at."""

    def install(self) -> None:
        """Watch what gradient tapes call in TensorFlow's own code, where AutoGraph converts nothing."""

        def watched(tape: Any, target: Any, sources: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
            if is_eager_step(sources):
                self._tell_of_eager_step()
            return self._gradient(tape, target, sources, *args, **kwargs)

        imperative_grad.imperative_grad = watched

    def uninstall(self) -> None:
        """Put TensorFlow's own function back."""
        imperative_grad.imperative_grad = self._gradient

    def called(self, function: Any) -> None:
        """Check a ``tf.function`` that eager code is about to call."""
        if function in self._seen:
            return
        self._seen.add(function)
        if record.could_possibly_record():
            self._told_of_tape = True
            self._warn(
                f"{function._name} is called under a gradient tape outside of any tf.function, where LMS "
                "cannot see the step; put the tape and the optimizer's update into one tf.function"
            )

    def _tell_of_eager_step(self) -> None:
        self._refuse(EAGER)
        if not self._told_of_tape:
            self._told_of_tape = True
            self._warn(EAGER)


def is_eager_step(sources: Sequence[Any]) -> bool:
    """Tell whether a gradient of ``sources``, as a tape gives them, trains a model eagerly."""
    if not tf.executing_eagerly() or tf_ops.inside_function():
        return False
    handles = [source for source in sources if getattr(source, "dtype", None) == tf.resource]
    return len(handles) >= FEWEST_VARIABLES
