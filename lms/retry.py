"""One second try: when the first step of a fitted plan runs out of memory, plan again with a larger margin.

The failed step may have updated some variables already, so their values are kept from before the step and
put back. What other ranks have received cannot be taken back, so a step with collectives is not tried again.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import tensorflow as tf

from lms.config import LMSConfig
from lms.inline import Call
from lms.swap_plan import SwapPlan
from lms.tf_graph import has_collectives

LARGER_MARGIN = 0.25
"""Added to the margin for the second try: a quarter of the device for what the prediction missed."""

RETRIED_POLICIES = ("auto", "budget")


@dataclass
class _Attempt:
    """A call that has planned graphs and has not finished its first step."""

    functions: list[Any]
    values: dict[int, tuple[Any, np.ndarray[Any, Any]]] = field(default_factory=dict)
    """By the id of a variable's handle the handle, and the value before the step."""
    unknown: bool = False
    """Whether the step makes variables of its own, whose first values nobody can put back."""


class Rescue:
    """Keeps what is needed to try a first step again; at most once in a process."""

    def __init__(self, config: LMSConfig) -> None:
        self.config = config
        """The configuration to plan with; its margin grows when the step is tried again."""
        self.message = self.refusal = ""
        self._attempt: _Attempt | None = None
        self._used = False

    def planned(self, call: Call, tf_graph: Any, made: SwapPlan) -> None:
        """A graph has been planned for the step that ``call`` is about to run."""
        if self._used or self.config.policy not in RETRIED_POLICIES or not call.functions:
            return
        if self._attempt is None:
            self._attempt = _Attempt(call.functions)
        with tf.init_scope():
            if not tf.executing_eagerly():
                return
            for handle in variable_handles(tf_graph):
                if id(handle) in self._attempt.values:
                    continue
                if bool(tf.raw_ops.VarIsInitializedOp(resource=handle)):
                    value = tf.raw_ops.ReadVariableOp(resource=handle, dtype=_dtype_of(handle))
                    self._attempt.values[id(handle)] = handle, value.numpy()
                else:
                    self._attempt.unknown = True

    def prepare(self, call: Call) -> bool:
        """After a failure: undo the step, forget its traces, enlarge the margin; False: no second try."""
        attempt, self._attempt = self._attempt, None
        if attempt is None or self._used:
            return False
        self.refusal = _why_not(attempt)
        if self.refusal:
            return False
        self._used = True
        for handle, value in attempt.values.values():
            tf.raw_ops.AssignVariableOp(resource=handle, value=tf.constant(value, _dtype_of(handle)))
        for function in attempt.functions:
            function._function_cache.clear()
        margin = min(0.9, self.config.margin + LARGER_MARGIN)
        self.message = (
            "the first step ran out of memory although the plan fitted; planned again with margin "
            f"{margin:.2f} instead of {self.config.margin:.2f} (a batch that an iterator gave is not seen "
            "again)"
        )
        self.config = replace(self.config, margin=margin)
        return True

    def done(self) -> None:
        """The outermost call is over: a step that worked needs no rescue."""
        self._attempt = None


def variable_handles(tf_graph: Any) -> Iterator[Any]:
    """The handles of all variables that a traced graph reads or writes.

    A graph's own list of variables has the ones that are read: not the momentum that a kernel updates, nor
    the total that a metric adds to.
    """
    for captured, _ in tf_graph.captures:
        handle = _outermost(captured)
        if handle is not None and handle.dtype == tf.resource and _dtype_of(handle) is not None:
            yield handle


def _outermost(tensor: Any) -> Any:
    """What a captured tensor stands for outside of all functions; ``None`` when it is made in one."""
    while tensor is not None and not hasattr(tensor, "numpy"):
        captures = getattr(tensor.graph, "captures", ())
        tensor = next((outer for outer, inner in captures if inner is tensor), None)
    return tensor


def _dtype_of(handle: Any) -> Any:
    """The type of a variable's value; ``None`` for iterators, tables and other resources."""
    data = getattr(handle, "_handle_data", None)
    return tf.as_dtype(data.shape_and_type[0].dtype) if data is not None and data.shape_and_type else None


def _why_not(attempt: _Attempt) -> str:
    if attempt.unknown:
        return "The step is not tried again: it makes variables while it runs, and their start is not known."
    traced = (one for function in attempt.functions for one in function._list_all_concrete_functions())
    if any(has_collectives(concrete.graph) for concrete in traced):
        return "The step is not tried again: other ranks may have received a part of it already."
    return ""
