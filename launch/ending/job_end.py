"""How a job ends: which signal goes to whom and when, which rank is to blame, and when nothing is left.

One object takes every decision, for ranks of our own and for those of another launcher. It touches no process
and reads no clock of its own: it is told events, and gives orders. ``tests/launch/ending`` drives it through
seeded schedules of events.
"""

import os
import signal
from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import Protocol

from launch.ending.termination import Termination
from launch.system.exit_status import exit_code_of, signal_name

SUSPECTS_HAVE_S = 3.0
"""How long a rank that began to exit before the one that failed may take to say its own exit code."""
_LAUNCHER_HAS_S = 10.0
"""How long a launcher may take to end once all of its ranks have."""
ONE_SIGNAL_S = 0.5
"""Within this time the same signal again is the same news: a batch system or a service manager may signal
every process of a job, and each of ours that gets it passes it on. A person who insists takes longer."""
_LOST = signal.SIGKILL
"""The status of a rank of which nothing more will be heard."""


@dataclass(frozen=True)
class Verdict:
    """Why the job ends, decided by the first thing that goes wrong."""

    exit_code: int
    line: str
    rank: int | None = None
    """Whose end it is."""
    of_launcher: bool = False
    """Whether all that is known is what the launcher said."""


class Orders(Protocol):
    """What the decisions have others do, and ask."""

    def signal_rank(self, rank: int, number: int) -> None:
        """Send a signal to the processes of a rank."""

    def signal_launcher(self, number: int) -> None:
        """Send a signal to the launcher."""

    def let_go(self) -> None:
        """Let what stands for ranks under a launcher end."""

    def note(self, text: str) -> None:
        """Say a line."""

    def describe_end(self, rank: int | None, status: int) -> str:
        """Name a rank (None: the launcher) and how it ended."""

    def explain_end(self, rank: int, status: int) -> str:
        """Say what more is known of a failure, as the end of a sentence."""

    def find_leaving_before(self, rank: int, others: Set[int]) -> frozenset[int]:
        """Find which of ``others`` began to exit before ``rank`` did."""


class JobEnd:
    """The state of a job on its way to its end. Use once.

    Attributes:
        verdict: Why the job ends, if anything went wrong.
        signalled: The signal that asked for the end, if one did.
        statuses: Wait statuses of ranks that have ended.
    """

    def __init__(
        self,
        world_size: int,
        orders: Orders,
        grace_s: float,
        clock: Callable[[], float],
        has_launcher: bool = False,
        is_elastic: bool = False,
    ) -> None:
        self._orders, self._grace_s, self._clock = orders, grace_s, clock
        self._launcher_runs = self._has_launcher = has_launcher
        self._is_elastic = is_elastic
        self._expected = set(range(world_size))
        self._running: set[int] = set()
        self._termination = Termination(grace_s, self._end_all, clock)
        self._launcher_end: Termination | None = None
        self._last_sent: int | None = None
        self._suspects: frozenset[int] = frozenset()
        self._told_at: dict[int, float] = {}
        """When each signal that asks for the end was first taken note of."""
        self.verdict: Verdict | None = None
        self.signalled: int | None = None
        self.statuses: dict[int, int] = {}

    # What is so

    @property
    def running(self) -> Set[int]:
        """The ranks that run, as far as is known."""
        return self._running

    @property
    def is_ending(self) -> bool:
        """Whether the job is being ended."""
        return self._termination.is_set

    @property
    def hurried(self) -> bool:
        """Whether somebody insisted on the end."""
        return self._termination.hurried

    @property
    def was_told(self) -> bool:
        """Tell whether a signal other than Ctrl-C's asked for the end: its sender asks once."""
        return any(number != signal.SIGINT for number in self._told_at)

    @property
    def over(self) -> bool:
        """Whether nothing of the job runs any more, or all has been tried."""
        if self._running and not self._termination.given_up:
            return False
        return not self._launcher_runs or (self._launcher_end is not None and self._launcher_end.given_up)

    @property
    def due(self) -> float | None:
        """When ``advance`` has something to do next, by the clock."""
        ends = (self._termination, self._launcher_end)
        return min((end.due for end in ends if end is not None and end.due is not None), default=None)

    # What happens

    def rank_started(self, rank: int) -> None:
        """Take note of a rank; one that comes late to an end is told at once."""
        self._running.add(rank)
        if self._last_sent is not None:
            self._orders.signal_rank(rank, self._last_sent)

    def rank_ended(self, rank: int, status: int) -> None:
        """Take note of a rank's end."""
        if rank not in self._running:
            return
        self._running.discard(rank)
        if not self._is_elastic:
            self.statuses[rank] = status
            self._judge(rank, status)
        self._end_launcher()

    def rank_lost(self, rank: int) -> None:
        """Take note that nothing more will be heard of a rank."""
        self.rank_ended(rank, _LOST)

    def launcher_ended(self, status: int) -> None:
        """Take note of the launcher's end; the ranks that it has left behind are ended."""
        self._launcher_runs = False
        self._launcher_end = None
        code = exit_code_of(status)
        if code == 0 and (self._is_elastic or not self._running):
            self._termination.set(signal.SIGTERM, SUSPECTS_HAVE_S)
            return
        how = self._orders.describe_end(None, status)
        if self.signalled is not None and self.verdict is None:
            if code and self._is_unsure:
                self.verdict = Verdict(128 + self.signalled, f"ended by {signal_name(self.signalled)}; {how}")
            return
        if self.verdict is not None and self.verdict.of_launcher:
            self.verdict = None
        self.end(Verdict(code or 1, how, of_launcher=True), signal.SIGTERM)

    def launcher_ends_rank(self, rank: int) -> None:
        """Take note that the launcher is ending a rank: for a reason of its own, which it says later."""
        if rank in self._running and not self._is_elastic and not self._termination.is_set:
            self.end(Verdict(1, "the launcher ended the job", of_launcher=True), signal.SIGTERM)

    def take_ending_signal(self, number: int) -> None:
        """Take note of a signal to the job that asks for its end."""
        self._suspects = frozenset()
        now = self._clock()
        is_again = number in self._told_at
        if is_again and now - self._told_at[number] < ONE_SIGNAL_S:
            return
        self._told_at.setdefault(number, now)
        if is_again and number == signal.SIGINT:
            self._termination.hurry()
        elif self.signalled is not None:
            self._signal_all(number)
        elif self._termination.is_set:
            # A termination that has begun keeps its deadline.
            self.signalled = number
            self._orders.note(f"{signal_name(number)}: passed on to the ranks, which are being ended already")
            self._signal_all(number)
        else:
            self.signalled = number
            self._orders.note(f"{signal_name(number)}: passed on to the ranks; they have {self._grace_s:g} s")
            self._termination.set(number)

    def pass_on(self, number: int) -> None:
        """Hand on a signal that asks for something else; a launcher might die of it, and gets none."""
        for rank in sorted(self._running):
            self._orders.signal_rank(rank, number)
        if missing := len(self._expected - self._running - self.statuses.keys()):
            self._orders.note(f"{signal_name(number)}: {missing} ranks have not started and do not get it")

    def end(self, verdict: Verdict, first_signal: int, delay_s: float = 0) -> None:
        """End the job for this reason, unless it is ending already."""
        if self.verdict is None:
            self.verdict = verdict
        if not self._termination.is_set:
            self._termination.set(first_signal, delay_s)

    def abandon(self, why: str) -> None:
        """Kill at once, for nobody is left who waits for the job."""
        self.end(Verdict(128 + signal.SIGKILL, why), signal.SIGKILL)
        self._termination.hurry()

    def advance(self) -> None:
        """Do what is due."""
        self._termination.advance()
        if self._termination.given_up:
            self._end_launcher()
        if self._launcher_end is not None:
            self._launcher_end.advance()

    # What follows

    @property
    def _is_unsure(self) -> bool:
        """Whether ranks may run that have not been heard of, or that the launcher alone can end."""
        return self._is_elastic or bool(self._expected - self._running - self.statuses.keys())

    def _judge(self, rank: int, status: int) -> None:
        was_suspect = self._clear_suspect(rank, status)
        if status == 0 or (self.verdict is not None and not was_suspect):
            return
        how = self._orders.describe_end(rank, status)
        if self.signalled is not None:
            code = 128 + self.signalled if os.WIFSIGNALED(status) else exit_code_of(status)
            self.verdict = Verdict(code, f"ended by {signal_name(self.signalled)}; {how}")
            return
        verdict = Verdict(exit_code_of(status), how + self._orders.explain_end(rank, status), rank)
        if was_suspect:
            self.verdict = verdict
            return
        self._suspects = self._orders.find_leaving_before(rank, self._running)
        self.end(verdict, signal.SIGTERM, SUSPECTS_HAVE_S if self._suspects else 0)

    def _clear_suspect(self, rank: int, status: int) -> bool:
        """Take note that a rank has ended; whether it may have begun the job's failure."""
        if rank not in self._suspects:
            return False
        others = self._suspects - {rank}
        self._suspects = others if status == 0 else self._orders.find_leaving_before(rank, others)
        if not self._suspects:
            self._termination.set(signal.SIGTERM)
        return True

    def _end_launcher(self) -> None:
        """Let the launcher end, once all of its ranks have; one that does not is made to."""
        if not self._launcher_runs:
            return
        all_ended = self._expected <= self.statuses.keys() or self._termination.is_set
        if self._termination.given_up or (all_ended and not self._running and not self._is_elastic):
            self._orders.let_go()
            if self._launcher_end is None:
                self._launcher_end = Termination(_LAUNCHER_HAS_S, self._orders.signal_launcher, self._clock)
                self._launcher_end.set(signal.SIGTERM, _LAUNCHER_HAS_S)

    def _end_all(self, number: int) -> None:
        self._suspects = frozenset()  # From here on a rank's end is our doing.
        self._signal_all(number)
        self._end_launcher()

    def _signal_all(self, number: int) -> None:
        self._last_sent = number
        for rank in sorted(self._running):
            self._orders.signal_rank(rank, number)
        # A launcher kills the ranks that it knows in its own time: it is told only where nobody else can.
        if self._launcher_runs and (self._is_unsure or (number == signal.SIGKILL and self.hurried)):
            self._orders.signal_launcher(number)
