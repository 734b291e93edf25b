"""Have a step planned again where its plan no longer fits beside what else lies on the device."""

import weakref
from collections import Counter
from dataclasses import dataclass
from typing import Any

from lms.device.device import Device
from lms.intercept.batch_growth import Growth
from lms.passes.work import Work
from lms.process.resources import Resources
from lms.report.render import mib

SHARE = 0.5
"""How much of what a plan leaves free others may take: the rest is for chunks that do not fit."""
RENEWALS = 4
"""A step is planned again at most so many times: what takes ever more memory is no matter of plans."""


@dataclass(frozen=True)
class _Roof:
    """The bytes that may lie on a device when a step begins, so that its plan fits."""

    device: Device
    before: int
    """What lay there when it was planned."""
    most: int


class OutsideMemory:
    """Compares what lies on the devices when a step begins with what lay there when it was planned.

    Args:
        growth: Counts the plans of each step.
        resources: Tells which free room on a device is part of the plans.
    """

    def __init__(self, growth: Growth, resources: Resources) -> None:
        self._growth, self._resources = growth, resources
        self._roofs: weakref.WeakKeyDictionary[Any, dict[tuple[str, int, str], _Roof]] = (
            weakref.WeakKeyDictionary()
        )
        """By step, then function of the runtime, number of the plan, and device."""
        self._renewed: Counter[str] = Counter()

    def planned(self, function: Any, name: str, work: Work) -> None:
        """Note what a plan of a step was made beside; a plan that does not fit is no better made anew."""
        config = work.task.config
        if function is None or work.task.guest or config.policy != "auto" or work.limit_bytes is None:
            return
        made = work.decision.plan if work.decision is not None else None
        peak = work.most_bytes if made is None else made.peak_bytes
        if peak is None or peak > work.limit_bytes or work.whole or (made and not made.feasible):
            return
        before = work.residents.nbytes
        roof = _Roof(work.device, before, before + int(SHARE * (work.limit_bytes - peak)))
        plan = self._growth.generation(function, name)
        self._roofs.setdefault(function, {})[name, plan, work.device.name] = roof

    def outgrown(self, function: Any, name: str) -> str:
        """Have a step planned again beside which too much lies; return what has grown, else nothing."""
        roofs = self._roofs.get(function) if function is not None else None
        plan = self._growth.generation(function, name) if roofs else 0
        for (whose, number, _), roof in [*roofs.items()] if roofs else ():
            if (whose, number) != (name, plan):
                continue
            memory, kept = roof.device.memory(), self._resources.rooms.kept_bytes(roof.device.name)
            if memory is None or memory[0] - kept <= roof.most or self._renewed[name] == RENEWALS:
                continue
            if not self._growth.renew_wholly(function, name):
                continue
            self._renewed[name] += 1
            self._roofs[function] = {}
            now = f"there are {mib(memory[0] - kept)} now"
            return f"was planned with {mib(roof.before)} on {roof.device.name} before it, and is again: {now}"
        return ""
