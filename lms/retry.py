"""One second try: when the first step of a fitted plan runs out of memory, plan again with a larger margin.

The failed step may have updated some variables already, so their values are kept from before the step and
put back.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import tensorflow as tf

from lms.config import LMSConfig
from lms.inline import Call
from lms.swap_plan import SwapPlan

LARGER_MARGIN = 0.25
"""Added to the margin for the second try: a quarter of the device for what the prediction missed."""

RETRIED_POLICIES = ("auto", "budget")


@dataclass
class _Attempt:
    """A call that has planned graphs and has not finished its first step."""

    functions: list[Any]
    values: dict[Any, Any] = field(default_factory=dict)


class Rescue:
    """Keeps what is needed to try a first step again; at most once in a process."""

    def __init__(self, config: LMSConfig) -> None:
        self.config = config
        """The configuration to plan with; its margin grows when the step is tried again."""
        self.message = ""
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
            for variable in getattr(tf_graph, "variables", ()):
                if bool(variable.is_initialized()):
                    self._attempt.values[variable.ref()] = variable.numpy()

    def prepare(self, call: Call) -> bool:
        """After a failure: undo the step, forget its traces, enlarge the margin; False: no second try."""
        attempt, self._attempt = self._attempt, None
        if attempt is None or self._used:
            return False
        self._used = True
        for reference, value in attempt.values.items():
            reference.deref().assign(value)
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
