"""When the first step of a fitted plan runs out of memory: again with a larger margin, then with policy all.

The failed step may have updated some variables already, so their values are kept from before the step and
put back; the batches that it took from iterators are kept as well (:mod:`lms.batches`) and given again. What
other ranks have received cannot be taken back, nor what lies in a table or a queue: such a step is not tried
again (:mod:`lms.effects`).
"""

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import tensorflow as tf

from lms.batches import Feed
from lms.config import LMSConfig
from lms.effects import cannot_be_undone, has_python
from lms.handles import value_type, variable_handles
from lms.inline import Call
from lms.swap_plan import SwapPlan

LARGER_MARGIN = 0.25
"""Added to the margin for the second try: a quarter of the device for what the prediction missed."""

RETRIED_POLICIES = ("auto", "budget")
"""Where the first try may be one of these; the last one is policy ``all``, behind which nothing is left."""


@dataclass
class _Attempt:
    """A call that has planned graphs and has not finished its first step."""

    functions: list[Any]
    feed: Feed
    values: dict[int, tuple[Any, np.ndarray[Any, Any]]] = field(default_factory=dict)
    """By the id of a variable's handle the handle, and the value before the step."""
    unknown: bool = False
    """Whether the step makes variables of its own, whose first values nobody can put back."""
    fits: bool = True
    """Whether every plan of the step kept to its budget; one that does not needs the least memory already."""


class _UnderWay(threading.local):
    """The attempt of each thread: an input pipeline, for one, calls functions while the step is at work."""

    attempt: _Attempt | None = None


LATER_STEP = (
    "The step is not tried again: it is not the first one, and has updated some variables already. Start "
    "again from the last checkpoint."
)


class Rescue:
    """Keeps what is needed to try a first step again; each kind of plan at most once in a process."""

    def __init__(self, config: LMSConfig) -> None:
        self.config = config
        """The configuration to plan with; another one when the step is tried again."""
        self.message = self.refusal = ""
        self._under_way = _UnderWay()
        self._left = list(_further_tries(config))
        self._worked = False

    @property
    def is_ready(self) -> bool:
        """Whether a step that is planned now may be tried again."""
        return bool(self._left)

    def planned(self, call: Call, tf_graph: Any, made: SwapPlan) -> None:
        """A graph has been planned for the step that ``call`` is about to run."""
        if not self._left or not call.functions:
            return
        if self._under_way.attempt is None:
            self._under_way.attempt = _Attempt(call.functions, call.feed)
        self._under_way.attempt.fits &= made.feasible
        self.traced(tf_graph)

    def traced(self, tf_graph: Any) -> None:
        """A graph of the same call is ready to run: one planned, or what calls it and has variables too."""
        attempt = self._under_way.attempt
        if attempt is None:
            return
        with tf.init_scope():
            if not tf.executing_eagerly():
                return
            for handle in variable_handles(tf_graph):
                if id(handle) in attempt.values:
                    continue
                if bool(tf.raw_ops.VarIsInitializedOp(resource=handle)):
                    value = tf.raw_ops.ReadVariableOp(resource=handle, dtype=value_type(handle))
                    attempt.values[id(handle)] = handle, value.numpy()
                else:
                    attempt.unknown = True

    def prepare(self) -> bool:
        """After a failure: undo the step, forget its traces, take the next plan; False: no further try."""
        attempt, self._under_way.attempt = self._under_way.attempt, None
        self.refusal = _why_not(attempt) if attempt else LATER_STEP if self._worked else ""
        if attempt is None or self.refusal:
            return False
        for handle, value in attempt.values.values():
            tf.raw_ops.AssignVariableOp(resource=handle, value=tf.constant(value, value_type(handle)))
        again = "; its numpy_function or py_function runs once more" if _runs_python(attempt) else ""
        for function in attempt.functions:
            function._function_cache.clear()
        attempt.feed.rewind()
        before, self.config = self.config, self._left.pop(0)
        self.message = (
            f"the first step ran out of memory although the plan fitted; planned again with "
            f"{_difference(before, self.config)}{again}"
        )
        return True

    def succeeded(self) -> None:
        """A call has run to its end: an edited step among them can no longer be a first one."""
        self._worked = self._worked or self._under_way.attempt is not None

    def done(self) -> None:
        """The outermost call is over: a step that worked needs no rescue."""
        self._under_way.attempt = None


def _further_tries(config: LMSConfig) -> Iterator[LMSConfig]:
    """How to plan after the first failure, and after the second."""
    if config.policy in RETRIED_POLICIES:
        yield replace(config, margin=min(0.9, config.margin + LARGER_MARGIN))
        yield replace(config, policy="all")


def _difference(before: LMSConfig, after: LMSConfig) -> str:
    if after.policy != before.policy:
        return f"policy {after.policy} instead of {before.policy}"
    return f"margin {after.margin:.2f} instead of {before.margin:.2f}"


def _why_not(attempt: _Attempt) -> str:
    if not attempt.fits:
        why = "no plan fits, and this one needs the least memory of all; take a smaller batch"
    elif attempt.unknown:
        why = (
            "it makes variables while it runs, and their start is not known; "
            "build model and optimizer before the first step"
        )
    else:
        kept = attempt.feed.is_complete
        why = attempt.feed.refusal or cannot_be_undone(_graphs(attempt), batches_are_kept=kept)
    return f"The step is not tried again: {why}." if why else ""


def _runs_python(attempt: _Attempt) -> bool:
    return has_python(_graphs(attempt))


def _graphs(attempt: _Attempt) -> list[Any]:
    """All graphs that have been traced for the functions of the step."""
    traced = (function._function_cache.values() for function in attempt.functions)
    return [concrete.graph for several in traced for concrete in several]
