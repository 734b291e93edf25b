"""Retry one of the first steps of a plan that ran out of memory: with a larger margin, then policy ``all``.

Where the plan was above its budget already, a larger margin asks for what no plan gives: ``all`` comes next.
The failed step may have updated some variables already, so their values are kept from before the step and
put back; the batches that it took from iterators are kept as well (:mod:`lms.intercept.batch_replay`) and
given again. The function is not traced again: TensorFlow optimizes it again, and the next plan is another.
The values of a session's variables are read before it plans a step (:mod:`lms.variables.session_values`).
A dataset that the step goes through itself begins anew; where it is shuffled, in another order. A function
that does so is planned anew in each call, so that its later calls may be tried again, too.

Free memory lies in other pieces after each of the first steps, so the next few of a plan that swaps are tried
again like the first one.

What other ranks have received cannot be taken back, nor what lies in a table or a queue: such a step is not
tried again (:mod:`lms.intercept.side_effects`). But a plan for a step that only exchanges something with
other ranks runs apart from them first (:mod:`lms.calls.runs_apart`), and is undone.
"""

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import tensorflow as tf

from lms.config import LMSConfig
from lms.intercept.function_calls import Call, RuntimeCall
from lms.intercept.side_effects import (
    cannot_be_undone,
    cannot_begin_anew,
    draws_from_seed,
    goes_through_dataset,
    runs_python,
    types_reached,
)
from lms.ir.op_traits import is_update
from lms.reader.node_table import NodeTable
from lms.variables.handles import value_type, variable_handles
from lms.variables.on_host import HostVariables
from lms.variables.session_values import SessionValues

LARGER_MARGIN = 0.25
"""Added to the margin for the second try: a quarter of the device for what the prediction missed."""

KEPT_CALLS = 16
"""The first calls of a function that goes through a dataset: for each its variables' values are copied."""

LATER_STEPS = 3
"""The steps behind the first one of a plan that may be tried again: all variables are copied before each. On
an H100 a U-Net ran out of memory in its third step."""

RETRIED_POLICIES = ("auto", "budget")
"""Behind these policies ``all`` is the last try. Behind ``all`` itself comes ``auto``: the plan with the
fewest bytes may find no room where free memory lies in pieces, and one for more bytes may."""


@dataclass
class Attempt:
    """The state kept of a call that has planned graphs and has not finished its first step."""

    name: str = ""
    """The function of the runtime, where it goes through a dataset itself."""
    values: dict[int, tuple[Any, np.ndarray[Any, Any]]] = field(default_factory=dict)
    """By the id of a variable's handle the handle, and the value before the step."""
    session: SessionValues | None = None
    """The values of a session's variables."""
    unknown: bool = False
    """Whether the step makes variables of its own, whose first values cannot be put back."""
    fits: bool = True
    """Whether every plan of the step kept to its budget."""
    lasting: str = ""
    """What the step does that cannot be undone."""
    python: bool = False
    """Whether Python code of the user is a part of the step."""
    anew: bool = False
    """Whether the step goes through a dataset itself, which begins anew."""
    covered: bool = True
    """Tells whether the plans hold all tensors of the step whose size matters."""
    edited: bool = False
    """Whether a plan of the step changes it."""
    draws: bool = False
    """Whether kernels of the step count what they draw: they begin anew with the next plan."""

    @property
    def may_settle(self) -> bool:
        """Tell whether the next steps may be tried again, too."""
        return self.edited and not (self.anew or self.unknown or self.draws or self.lasting)

    def keep(self, inputs: Sequence[Any]) -> None:
        """Keep the values that the variables among ``inputs`` have now, but those that are kept already."""
        for handle in variable_handles(inputs):
            if id(handle) in self.values:
                continue
            if value_type(handle) in (tf.resource, tf.variant):
                self.lasting = self.lasting or NO_ARRAY
                continue
            try:
                value = tf.raw_ops.ReadVariableOp(resource=handle, dtype=value_type(handle))
            except tf.errors.FailedPreconditionError:
                self.unknown = True
            else:
                self.values[id(handle)] = handle, value.numpy()


WITHIN = (
    "the step is a function within the one that is called, as one that goes through a dataset has, and what "
    "it began with is not known any more; pass an iterator"
)
THROUGH = "it goes through a dataset, which may give other batches the second time; pass an iterator"
ANEW = (
    "; the dataset that it goes through begins anew, and may give its batches in another order than "
    "without LMS"
)

NO_ARRAY = "it has a variable whose value is no array, and cannot be kept"
UNPLANNED = "nothing was planned for it"
DRAWS_ON = (
    "its kernels count what they draw from a seed, and a session keeps them, so that they would draw others "
    "now; draw statelessly (tf.random.stateless_uniform), or begin with a smaller batch"
)

BESIDE = (
    "The step is not tried again: something else ran beside it in the same session, or with the same "
    "variables."
)

LATER_STEP = (
    "The step is not tried again: it is not one of the first, and has updated some variables already. Start "
    "again from the last checkpoint."
)


TRIED_ALL = "The step is not tried again: the other kinds of plan were tried for it already."
NO_ROOM = (
    "The step is not tried again: the device has no room to give its variables their values back. "
    "Start again with a smaller batch, or from the last checkpoint."
)


class Rescue:
    """Keeps what is needed to retry first steps; each kind of plan is tried at most once for a function.

    What one function takes says nothing of the next: who looks for the largest batch that fits catches the
    error, and goes on with a smaller one.
    """

    def __init__(self, config: LMSConfig, host: HostVariables) -> None:
        self._host, self._all_tries = host, [config, *_further_tries(config)]
        self.message = self.refusal = ""
        self._tries: weakref.WeakKeyDictionary[Any, list[LMSConfig]] = weakref.WeakKeyDictionary()
        """By function that was tried again the configuration that it is planned with, and those behind it."""
        self._kept_calls: Counter[str] = Counter()
        """By function of the runtime the calls for which what it may change was kept."""
        self._over_budget: set[str] = set()
        """The functions of the runtime that go through a dataset, and whose last plan is above its budget."""
        self._worked: weakref.WeakSet[Any] = weakref.WeakSet()
        """The functions of which a planned step has run to its end."""
        self._lock = threading.Lock()
        self._settling: weakref.WeakKeyDictionary[Any, tuple[Attempt, int]] = weakref.WeakKeyDictionary()
        """By function what is known of its step, and how many more of its calls may be tried again."""

    def config_for(self, function: Any) -> LMSConfig:
        """Return the configuration to plan a function with; another one when its step is tried again."""
        return self._tries_of(function)[0]

    def is_ready(self, function: Any) -> bool:
        """Tell whether a step of a function that is planned now may be tried again."""
        return len(self._tries_of(function)) > 1

    def _tries_of(self, function: Any) -> list[LMSConfig]:
        known = None if function is None else self._tries.get(function)
        return known or self._all_tries

    def settles(self, function: Any) -> bool:
        """Tell whether the next call of a function may be tried again although it was planned before."""
        return function in self._settling and self.is_ready(function)

    def begins(self, call: Call, runtime: RuntimeCall) -> None:
        """Keep what a function may change that settles, or that goes through a dataset, before it runs.

        What it trains is a function of the dataset's, which is planned when it has changed something already,
        and anew in each call.
        """
        if call.function is None or not self.is_ready(call.function):
            return
        if (settling := self._settling.get(call.function)) is not None:
            known, _ = settling
            call.begun = call.begun or replace(known, values={})
            call.begun.keep(runtime.inputs)
        if call.begun is not None or not any(one.dtype == tf.variant for one in runtime.inputs):
            return
        if self._kept_calls[runtime.name] == KEPT_CALLS:
            return
        self._kept_calls[runtime.name] += 1
        types = types_reached([runtime.name])
        if not (goes_through_dataset(types) and any(map(is_update, types))):
            return
        leaves = tf.nest.flatten(call.arguments)
        datasets = [one for one in leaves if isinstance(one, tf.data.Dataset)]
        lasting = cannot_begin_anew(runtime.name, runtime.inputs, datasets)
        call.begun = Attempt(
            runtime.name,
            fits=runtime.name not in self._over_budget,
            lasting=lasting,
            python=runs_python(types),
            anew=True,
        )
        if not lasting:
            call.begun.keep(runtime.inputs)

    def begins_in_session(
        self, call: Call, read: Callable[[], SessionValues | None], *, is_new: bool
    ) -> None:
        """Keep the values of a session's variables before a step that settles, or that is planned anew.

        Args:
            call: The run.
            read: Reads the values; ``None`` where the run trains nothing.
            is_new: Whether the run may be planned.
        """
        settling = self._settling.get(call.function)
        if call.begun is not None or not (is_new or settling) or not self.is_ready(call.function):
            return
        if (values := read()) is not None:
            known = Attempt(lasting=UNPLANNED) if settling is None else settling[0]
            call.begun = replace(known, session=values, lasting=known.lasting or values.lost)

    def planned(
        self,
        call: Call,
        table: NodeTable,
        inputs: Sequence[Any],
        *,
        fits: bool,
        covered: bool,
        edited: bool,
        is_body: bool,
        draws: bool = False,
    ) -> None:
        """Note that a graph was planned for the step of ``call``, or for a body within it (``is_body``).

        ``inputs`` are those of the graph; those of a body are not known. ``fits`` says whether the plan keeps
        to its budget, ``covered`` whether it holds all tensors, ``edited`` whether it changes the graph,
        ``draws`` whether kernels within the functions that it calls count what they draw.
        """
        if call.function is None or not self.is_ready(call.function):
            if call.begun is not None and call.begun.lasting == UNPLANNED:
                call.begun = replace(call.begun, lasting="")
            return
        if call.attempt is None:
            call.attempt = replace(call.begun, fits=True) if call.begun is not None else Attempt()
        attempt: Attempt = call.attempt
        attempt.fits &= fits
        attempt.covered &= covered
        attempt.edited |= edited
        is_seeded = draws_from_seed(table)
        attempt.draws |= is_seeded or draws
        if attempt.name:
            (self._over_budget.discard if attempt.fits else self._over_budget.add)(attempt.name)
        if attempt.session is not None:
            attempt.lasting = attempt.session.lost or (DRAWS_ON if is_seeded else "")
        if not is_body:
            in_session, kept = attempt.session is not None, call.feed.handles
            undone = cannot_be_undone(table, inputs, kept, in_session=in_session)
            attempt.lasting = attempt.lasting or undone
        if (is_body or goes_through_dataset(table.types)) and not (call.begun and call.begun.anew):
            attempt.lasting = attempt.lasting or (WITHIN if is_body else THROUGH)
        attempt.python |= runs_python(table.types)
        attempt.keep(inputs)

    def prepare(self, call: Call, *, is_alone: bool) -> bool:
        """Undo the failed step and choose the next kind of plan; return False if it cannot be retried.

        ``is_alone`` tells whether no other step may have changed the same variables since it began.
        """
        with self._lock:
            return self._prepare(call, is_alone=is_alone)

    def _prepare(self, call: Call, *, is_alone: bool) -> bool:
        attempt: Attempt | None = call.attempt or call.begun
        call.attempt = None
        before, *left = self._tries_of(call.function)
        worked = call.function in self._worked
        refused = "" if not worked else LATER_STEP if left else TRIED_ALL
        self.refusal = _why_not(attempt, call) if attempt else refused
        if attempt is not None and not is_alone:
            self.refusal = self.refusal or BESIDE
        if attempt is None or self.refusal:
            return False
        tries = left if attempt.fits else [one for one in left if one.policy == "all"]
        if not tries:
            return False
        try:
            self.give_back(attempt)
        except tf.errors.OpError:
            self.refusal = NO_ROOM
            return False
        again = "; its numpy_function or py_function runs once more" if attempt.python else ""
        again += ANEW if attempt.anew else ""
        call.feed.rewind()
        self._tries[call.function] = tries
        which, why = "a step" if worked else "the first step", ""
        if not attempt.covered:
            which += ", some of whose tensors are in no plan,"
        elif attempt.fits:
            why = " although the plan fitted"
        self.message = (
            f"{which} ran out of memory{why}; planned again with {_difference(before, tries[0])}{again}"
        )
        return True

    def give_back(self, attempt: Attempt) -> None:
        """Give the variables of a step the values that it began with."""
        if attempt.session is not None:
            attempt.session.put_back()
        for handle, value in attempt.values.values():
            with tf.device("CPU:0"):
                before = tf.constant(value, value_type(handle))
            if self._host.holds(handle):
                self._host.put(handle, before)
            else:
                tf.raw_ops.AssignVariableOp(resource=handle, value=before)

    def succeeded(self, call: Call) -> None:
        """Note that a call has run to its end; if it was planned, its next steps settle."""
        attempt: Attempt | None = call.attempt
        if attempt is not None:
            self._worked.add(call.function)
            self._settling.pop(call.function, None)
            if attempt.may_settle:
                self._settling[call.function] = replace(attempt, values={}, session=None), LATER_STEPS
        elif (settling := self._settling.pop(call.function, None)) is not None:
            known, left = settling
            if left > 1:
                self._settling[call.function] = known, left - 1


def _further_tries(config: LMSConfig) -> Iterator[LMSConfig]:
    """Yield how to plan after the first failure, and after the second."""
    larger = replace(config, margin=min(0.9, config.margin + LARGER_MARGIN))
    if config.policy in RETRIED_POLICIES:
        yield larger
        yield replace(larger, policy="all")
    elif config.policy == "all":
        yield replace(config, policy="auto")
        yield replace(larger, policy="auto")


def _difference(before: LMSConfig, after: LMSConfig) -> str:
    if after.policy != before.policy:
        return f"policy {after.policy} instead of {before.policy}"
    return f"margin {after.margin:.2f} instead of {before.margin:.2f}"


def _why_not(attempt: Attempt, call: Call) -> str:
    if attempt.unknown:
        why = (
            "it makes variables while it runs, and their start is not known; "
            "build model and optimizer before the first step"
        )
    else:
        why = call.feed.refusal or attempt.lasting
    return f"The step is not tried again: {why}." if why else ""
