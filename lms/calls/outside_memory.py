"""Have a step planned again where its plan no longer fits beside what else lies on the device."""

import weakref
from dataclasses import dataclass, field
from typing import Any

from lms.device.device import Device
from lms.intercept.batch_growth import Growth
from lms.passes.work import Work
from lms.process.resources import Resources
from lms.report.render import mib

SHARE = 0.5
"""Limits the share of what a plan leaves free for others: the rest is for chunks that do not fit."""
RENEWALS = 4
"""Limits how often a step is planned again: what takes ever more memory is no matter of plans."""


@dataclass(frozen=True)
class _Threshold:
    """Tells how much may lie on a device when a step begins, so that its plan fits."""

    device: Device
    before_bytes: int
    """Counts what lay there when it was planned."""
    most_bytes: int


@dataclass
class _Step:
    """Keeps the thresholds of a step's plans, and counts how often it was planned again."""

    thresholds: dict[int, dict[str, _Threshold]] = field(default_factory=dict)
    """Holds them by number of the plan and name of the device."""
    renewals: int = 0


class OutsideMemory:
    """Compares what lies on the devices when a step begins with what lay there when it was planned.

    Args:
        growth: Counts the plans of each step.
        resources: Tells which free room on a device is part of the plans.
    """

    def __init__(self, growth: Growth, resources: Resources) -> None:
        self._growth, self._resources = growth, resources
        self._steps: weakref.WeakKeyDictionary[Any, dict[str, _Step]] = weakref.WeakKeyDictionary()
        """Holds them by function (or session and its feeds and fetches), then by the runtime's name of it."""

    def planned(self, function: Any, name: str, work: Work) -> None:
        """Note beside what a step was planned; a plan that does not fit is no better made anew.

        Args:
            function: The step's function, or session and set of feeds and fetches.
            name: The function of the runtime; empty for a session.
            work: One graph of the step, planned. Of several the least room counts. Bodies of called functions
                are planned while the step runs already.
        """
        task = work.task
        if function is None or task.guest or task.is_body or task.config.policy != "auto":
            return
        made = work.decision.plan if work.decision is not None else None
        peak, limit = work.most_bytes if made is None else made.peak_bytes, work.limit_bytes
        if peak is None or limit is None or peak > limit or work.whole or (made and not made.feasible):
            return
        before = work.residents.nbytes
        found = _Threshold(work.device, before, before + int(SHARE * (limit - peak)))
        step = self._steps.setdefault(function, {}).setdefault(name, _Step())
        known = step.thresholds.setdefault(self._growth.generation(function, name), {})
        least = min(known.get(work.device.name, found), found, key=lambda one: one.most_bytes)
        known[work.device.name] = least

    def outgrown(self, function: Any, name: str) -> str:
        """Have a step planned again where too much lies beside it.

        Args:
            function: As of :meth:`planned`.
            name: As of :meth:`planned`.

        Returns:
            What has grown, for a warning; empty where the step is not planned again.
        """
        step = self._steps.get(function, {}).get(name) if function is not None else None
        if step is None or step.renewals == RENEWALS:
            return ""
        for one in step.thresholds.get(self._growth.generation(function, name), {}).values():
            memory, kept = one.device.memory(), self._resources.rooms.kept_bytes(one.device.name)
            if memory is None or memory[0] - kept <= one.most_bytes:
                continue
            if not self._growth.renew_wholly(function, name):
                return ""
            step.renewals += 1
            step.thresholds.clear()
            before, now = mib(one.before_bytes), mib(memory[0] - kept)
            return (
                f"was planned with {before} on {one.device.name} before it, and is again: there are {now} now"
            )
        return ""
