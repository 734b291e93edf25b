"""Have a plan run apart from other ranks first, in steps that are undone.

The graph of such a run (:mod:`lms.calls.apart`) must reach nobody else. TensorFlow keeps graphs by the
options that they were optimized with, so each of these calls has options of its own, by a number that no
plan has.
"""

import itertools
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from lms.intercept.function_calls import Call
from lms.intercept.oom_retry import Attempt, Rescue
from lms.intercept.side_effects import PEERS, cannot_be_undone, exchanges, folds_exchanges
from lms.process_state import has_peers
from lms.reader.node_table import NodeTable

RUNS = 1 + 2
"""The runs of a plan apart from other ranks: free memory lies in other pieces after each."""


@dataclass
class Apart:
    """The runs of a call apart from other ranks."""

    name: str
    """The function of the runtime."""
    plan: int
    number: int
    """Of the options: below 0, where no plan has its number."""
    runs: int = 0
    """Counts the runs apart that are left; 0: the graph of these options turns out to be the real one."""
    attempt: Attempt | None = None
    """The state kept to undo a run."""
    held: Any = None
    """Takes the memory on the device that the exchange with other ranks will take."""


class RunsApart:
    """Decides which calls run apart from other ranks first, and undoes what they do.

    Args:
        rescue: Keeps the state to undo them, and tells whether another plan would be left to try.
    """

    def __init__(self, rescue: Rescue) -> None:
        self._rescue, self._lock = rescue, threading.Lock()
        self._new_numbers = itertools.count(-1, -1)
        self._numbers: weakref.WeakKeyDictionary[Any, dict[tuple[str, int], int]] = (
            weakref.WeakKeyDictionary()
        )
        """By function, function of the runtime and plan the number of the options that the plan runs with."""
        self._under_way: weakref.WeakSet[Any] = weakref.WeakSet()
        """The functions of which a call may run apart now."""
        self._exchanging: dict[str, bool] = {}
        """By function of the runtime whether it has collectives for which copies may stand."""

    @property
    def count(self) -> int:
        """The number of plans that ran apart, and now run with the other ranks."""
        return sum(number >= 0 for known in self._numbers.values() for number in known.values())

    def number(self, call: Call, name: str, plan: int) -> int:
        """Return the number of the options for a call: the plan's own, or one for a plan to run apart first.

        Args:
            call: The call.
            name: The function of the runtime that it runs.
            plan: The number of the plan.
        """
        function, apart = call.function, call.apart
        if function is None or not has_peers():
            return plan
        if apart is not None:
            return int(apart.number) if apart.name == name else plan
        with self._lock:
            known = self._numbers.get(function, {}).get((name, plan))
            if known is not None:
                return known
            if (
                function in self._under_way
                or not self._rescue.is_ready(function)
                or not self._exchanges(name)
            ):
                return plan
            self._under_way.add(function)
            made = call.apart = Apart(name, plan, next(self._new_numbers))
            return made.number

    def _exchanges(self, name: str) -> bool:
        if name not in self._exchanging:
            self._exchanging[name] = exchanges(name)
        return self._exchanging[name]

    def begins(self, call: Call, table: NodeTable, inputs: Sequence[Any]) -> bool:
        """Tell whether the plan just made for a call runs apart from other ranks first.

        Args:
            call: The call.
            table: Its step, as it was planned.
            inputs: What its function is called with.
        """
        attempt: Attempt | None = call.attempt
        if call.apart is None or attempt is None or attempt.lasting != PEERS or attempt.unknown:
            return False
        if call.begun is not None or call.feed.refusal:
            return False
        if cannot_be_undone(table, inputs, call.feed.handles, apart=True):
            return False
        if folds_exchanges(call.apart.name, table):
            return False
        attempt.lasting = ""
        call.apart.attempt, call.apart.runs = attempt, RUNS
        return True

    def is_apart(self, call: Call) -> bool:
        """Tell whether what a call runs is apart from other ranks."""
        return call.apart is not None and call.apart.runs > 0

    def undo(self, call: Call) -> None:
        """Undo a run apart from other ranks; behind the last one the step runs with them.

        What another thread has done to the same variables meanwhile is undone, too: nothing ran beside the
        step when it began.

        Raises:
            tf.errors.OpError: If it cannot be undone.
        """
        apart = call.apart
        self._give_back(apart)
        call.feed.rewind()
        apart.runs -= 1
        if not apart.runs:
            call.attempt, call.tried = None, True
            self._settle(call, apart.plan)

    def ran(self, call: Call) -> None:
        """Note that a call has run its step, and not apart: its options have the real graph."""
        if call.apart is not None:
            self._settle(call, call.apart.number)

    def leave(self, call: Call, *, undone: bool = False) -> None:
        """End what a call runs apart by an error; undo it as far as possible, if it is not ``undone`` yet."""
        if call.apart is None:
            return
        if call.apart.runs and not undone:
            with suppress(tf.errors.OpError):
                self._give_back(call.apart)
        self._settle(call, None)

    def _give_back(self, apart: Apart) -> None:
        apart.held = None
        if apart.attempt is not None:
            self._rescue.give_back(apart.attempt)

    def _settle(self, call: Call, number: int | None) -> None:
        """End what a call runs apart; its plan has options of this number from now on, if there is one."""
        with self._lock:
            apart, call.apart = call.apart, None
            self._under_way.discard(call.function)
            if number is not None:
                self._numbers.setdefault(call.function, {})[apart.name, apart.plan] = number
