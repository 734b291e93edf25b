"""Keeps one rank that another launcher started: its program's parent, out of that launcher's reach.

A launcher that ends its job kills what it has started, and the group of it: Open MPI a second after SIGTERM,
Hydra and horovodrun in their own time. So the keeper and its program have sessions of their own, and what the
launcher has started only stands for them. The supervisor of the job talks to the keeper over a channel: it
sends the signals, learns of the program's end first, and says when to go. So no launcher sees a signal, nor a
rank that failed, before every rank has had its time; and a job ends the same way under all of them.
"""

import os
import select
import signal
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from launch.channel.client import Supervisor
from launch.channel.messages import to_count
from launch.supervise.oom_kills import explain_memory, read_memory_counters
from launch.system.process_tree import group_lives, reap_children, signal_group, sweep

if TYPE_CHECKING:
    from launch.rank.output import Tee

_SWEEP_LIMIT_S = 5.0
_PAUSE_S = 0.05
"""Sets how often the program's group is looked at once its first process has ended."""
_LOAD_S = 5.0
"""How often a supervisor that the rank reaches over TCP hears what the program is at."""
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class Keeper:
    """Stays until the program has ended and nobody needs to hear of it any more. Use once.

    Attributes:
        why: What more than the program's status makes it a failure, or explains it, as the end of a sentence.
    """

    def __init__(
        self, program: int, tees: "Sequence[Tee]", supervisor: Supervisor | None, starter: int, alarm: int
    ) -> None:
        """Take over a program.

        Args:
            program: Its process, which leads a session.
            tees: What carries its output; none: it writes to the launcher itself.
            supervisor: Who is to hear of it; None: the launcher alone.
            starter: A pipe that ends when the process ends that the launcher has started.
            alarm: Where the numbers of signals arrive.
        """
        self._program, self._supervisor = program, supervisor
        self._starter, self._alarm = starter, alarm
        self._tees = tees
        self._status: int | None = None
        self._first_status: int | None = None
        """Tells how the program itself has ended, while processes that it started still save something, or
        its last words wait."""
        self._is_drained = False
        self._grace_s: float | None = None  # Until the supervisor has taken us in.
        self._asked_at: float | None = None
        self._kill_at: float | None = None
        self._senders: dict[int, str] = {}
        self._may_go = False
        self._memory = read_memory_counters()
        self._has_killed = False
        self._next_load = time.monotonic() + _LOAD_S
        self.why = ""

    def stay(self, is_elastic: bool) -> int:
        """Carry output and signals until the end; returns the program's wait status.

        Args:
            is_elastic: Whether the launcher itself copes with the end of ranks, and has to see it.
        """
        while self._status is None or self._is_awaited(is_elastic):
            self._turn()
        if self._supervisor is not None:
            sweep(_SWEEP_LIMIT_S)
        for tee in self._tees:
            tee.drain()
        return self._status

    @property
    def is_released(self) -> bool:
        """Whether the supervisor has taken note of how the program ended, and answers for it."""
        return self._may_go

    @property
    def was_ended(self) -> bool:
        """Whether the launcher had asked the program to end."""
        return "launcher" in self._senders.values()

    def _is_awaited(self, is_elastic: bool) -> bool:
        there = self._supervisor is not None and self._supervisor.open
        return there and not self._may_go and not is_elastic

    def _turn(self) -> None:
        poller = select.poll()
        supervisor = self._supervisor if self._supervisor is not None and self._supervisor.open else None
        # What the program has left running goes on writing, but not before the program's own last words.
        reads = not self._is_drained or self._status is not None
        sources = {tee.source: tee for tee in self._tees if reads and tee.source >= 0 and tee.sink < 0}
        sinks = {tee.sink: tee for tee in self._tees if tee.sink >= 0}
        for fd in (self._alarm, self._starter, *sources):
            if fd >= 0:
                poller.register(fd, select.POLLIN)
        for fd in sinks:
            poller.register(fd, select.POLLOUT)
        if supervisor is not None:
            poller.register(supervisor.fileno(), select.POLLIN)
        tells = supervisor is not None and not supervisor.sees_us and self._status is None
        looks = None if self._first_status is None else time.monotonic() + _PAUSE_S
        due = [at for at in (self._kill_at, self._next_load if tells else None, looks) if at is not None]
        wait_ms = max(0.0, min(due) - time.monotonic()) * 1000 if due else None
        ready = {fd for fd, _ in poller.poll(wait_ms)}
        if self._alarm in ready:
            self._take_signals(os.read(self._alarm, 4096))
        for fd in ready & sources.keys():
            sources[fd].pump()
        for fd in ready & sinks.keys():
            sinks[fd].push()
        if supervisor is not None and supervisor.fileno() in ready:
            self._listen(supervisor)
        if self._starter in ready:
            self._take_over()
        if self._kill_at is not None and self._kill_at <= time.monotonic():
            self._kill()
        if looks is not None:
            self._reap()
        if tells and self._next_load <= time.monotonic():
            self._tell_load()
            if supervisor is not None and not supervisor.open:
                self._lose()

    def _tell_load(self) -> None:
        """Say what the program is at to a supervisor that cannot see it."""
        self._next_load = time.monotonic() + _LOAD_S
        if self._supervisor is None or self._supervisor.sees_us:
            return
        from launch.system.process_load import read_load  # Few ranks need it.

        if (load := read_load(self._program)) is not None:
            self._supervisor.tell({"load": [load.is_stopped, load.cpu_s, load.at_s]})

    def _take_signals(self, numbers: bytes) -> None:
        for number in numbers:
            if number != signal.SIGCHLD:
                self._pass_on(number, "launcher")
        self._reap()

    def _reap(self) -> None:
        """Take the statuses of all that has ended: orphans of the program come to us too."""
        for pid, status in reap_children():
            if pid == self._program:
                self._first_status = status
        is_asked = self._asked_at is not None
        if self._first_status is None or (is_asked and group_lives(self._program)):
            return
        if not self._is_drained:
            self._is_drained = True
            for tee in self._tees:
                tee.drain()
        # Its last words come before the news of its end, unless nobody takes them.
        if self._has_killed or all(tee.sink < 0 for tee in self._tees):
            first, self._first_status = self._first_status, None
            self._take_end(first)

    def _take_end(self, status: int) -> None:
        lost = next((tee for tee in self._tees if tee.error is not None), None)
        if lost is not None and lost.error is not None:
            self.why = f"; could not write {lost.name} ({lost.error.strerror})"
        self._status = status or (1 << 8 if self.why else 0)
        if status == signal.SIGKILL and not self._has_killed:
            self.why += explain_memory(self._memory, read_memory_counters())
        if self._supervisor is not None:
            self._supervisor.tell({"ended": self._status, "why": self.why})

    def _listen(self, supervisor: Supervisor) -> None:
        for message in supervisor.receive():
            grace_s, number = message.get("grace_s"), to_count(message.get("signal"), signal.NSIG)
            if isinstance(grace_s, (int, float)):
                self._grace_s = float(grace_s)
                self._limit_end()
            if number:
                self._pass_on(number, "supervisor")
            self._may_go = self._may_go or message.get("leave") is True
        if not supervisor.open and not self._may_go:
            self._lose()

    def _lose(self) -> None:
        """End the program once its supervisor is gone, or go on without one that never took it in."""
        if self._grace_s is not None or self._starter < 0:
            self._kill()  # Nothing of the job is to survive who has started it.
        else:
            self._supervisor = None  # It has no room for us, or takes us for somebody else.

    def _take_over(self) -> None:
        """Go on without what the launcher has started: it was killed, so the job is being ended."""
        os.close(self._starter)
        self._starter = -1
        if self._supervisor is None or not self._supervisor.open:
            self._kill()
        elif self._asked_at is None:
            self._pass_on(signal.SIGTERM, "launcher")

    def _pass_on(self, number: int, sender: str) -> None:
        """Send a signal to the program's processes; the same news from two sides comes to them once."""
        if number in _ENDING:
            if self._senders.setdefault(number, sender) != sender:
                return
            if self._asked_at is None:
                self._asked_at = time.monotonic()
                self._limit_end()
            if self._supervisor is not None and sender == "launcher":
                self._supervisor.tell({"ending": True})
        if self._status is not None:
            return
        if number == signal.SIGKILL:
            self._kill()
            return
        if number in _ENDING and sender == "supervisor":
            self._tell_load()  # The signal ends what is stopped, too, and nobody could see it afterwards.
        signal_group(self._program, number)
        if number != signal.SIGSTOP:
            signal_group(self._program, signal.SIGCONT)

    def _limit_end(self) -> None:
        """Give the program the grace period, from when it was first asked to end; a launcher has its own."""
        if self._grace_s is not None and self._asked_at is not None:
            self._kill_at = self._asked_at + self._grace_s

    def _kill(self) -> None:
        self._kill_at = None
        if self._status is None:
            self._has_killed = True
            signal_group(self._program, signal.SIGKILL)


def take_signals(numbers: Sequence[int]) -> int:
    """Have these signals and the ends of children arrive as bytes; returns the descriptor to read."""
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    for number in (*numbers, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    return reading
