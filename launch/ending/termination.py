"""How a job is ended: signals one after the other, each at its time."""

import signal
import time
from collections.abc import Callable

_UNKILLABLE_AFTER_S = 10.0
"""How long after SIGKILL a process counts as stuck in the kernel."""


def plan_signals(first: int, grace_s: float) -> list[tuple[float, int]]:
    """Plan the signals that end a job, delays in seconds: what came, SIGTERM half-way, SIGKILL at the end."""
    steps = [(0.0, first)]
    if first != signal.SIGTERM:
        steps.append((grace_s / 2, signal.SIGTERM))
    return [*steps, (grace_s, signal.SIGKILL)]


class Termination:
    """Sends the signals that are due. Use one a job.

    Attributes:
        hurried: Whether SIGKILL was sent ahead of its time.
    """

    def __init__(
        self, grace_s: float, send: Callable[[int], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._grace_s, self._send, self._clock = grace_s, send, clock
        self._steps: list[tuple[float, int]] = []
        self.hurried = False

    @property
    def is_set(self) -> bool:
        """Whether the job is being ended."""
        return bool(self._steps)

    @property
    def due(self) -> float | None:
        """When something is to be done next, by the clock."""
        return self._steps[0][0] if self._steps and not self.given_up else None

    @property
    def given_up(self) -> bool:
        """Whether ranks have outlasted SIGKILL, stuck in the kernel."""
        return bool(self._steps) and self._steps[0][1] == 0 and self._steps[0][0] <= self._clock()

    def set(self, first: int, delay_s: float = 0) -> None:
        """Begin to end the job with this signal, now or a little later."""
        now = self._clock() + delay_s
        self._steps = [(now + delay, step) for delay, step in plan_signals(first, self._grace_s)]
        self.advance()

    def advance(self) -> None:
        """Send the signals that are due."""
        while self._steps and self._steps[0][0] <= self._clock() and not self.given_up:
            _, number = self._steps.pop(0)
            self._send(number)
            if number == signal.SIGKILL:
                self._steps = [(self._clock() + _UNKILLABLE_AFTER_S, 0)]

    def hurry(self) -> None:
        """Send SIGKILL at once."""
        if not self.hurried:
            self.hurried = True
            self._steps = [(self._clock(), signal.SIGKILL)]
            self.advance()
