"""The steps that ran: how long each took and how high memory has been, within fixed room."""

import time
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

MOST_STEPS = 512
"""When so many are kept every second one is dropped, and from then on only every second one is kept."""


class Step(NamedTuple):
    """One step that ran."""

    number: int
    seconds: float
    peak_bytes: int | None
    """The most bytes on the device since the last edit; ``None`` where nothing counts them."""


class History:
    """Keeps the steps of a process.

    Args:
        read_peak: Reads the peak of device memory; ``None`` where nothing counts it: it is not asked again.
    """

    def __init__(self, read_peak: Callable[[], int | None]) -> None:
        self._read_peak: Callable[[], int | None] | None = read_peak
        self._planned: weakref.WeakSet[Any] = weakref.WeakSet()
        self._every = 1
        self.count = 0
        """The steps that ran."""
        self.steps: list[Step] = []

    def planned(self, owner: Any) -> None:
        """Note that ``owner``, a function or a session's graph, holds a training step."""
        self._planned.add(owner)

    def holds_step(self, owner: Any) -> bool:
        """Tell whether a training step was planned for ``owner``."""
        return owner in self._planned

    def run(self, owner: Any, step: Callable[[], Any]) -> Any:
        """Run ``step``, and keep it if ``owner`` turns out to hold a training step."""
        started_s = time.perf_counter()
        result = step()
        if self.holds_step(owner):
            self._keep(time.perf_counter() - started_s)
        return result

    def _keep(self, seconds: float) -> None:
        if self.count % self._every == 0:
            self.steps.append(Step(self.count, seconds, self._peak()))
            if len(self.steps) > MOST_STEPS:
                del self.steps[1::2]
                self._every *= 2
        self.count += 1

    def _peak(self) -> int | None:
        peak = self._read_peak() if self._read_peak is not None else None
        if peak is None:
            self._read_peak = None
        return peak
