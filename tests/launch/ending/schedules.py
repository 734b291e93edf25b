"""Seeded schedules of events for ``JobEnd``: what can happen to a job, in any order, on a clock of their own.

    python tests/launch/ending/schedules.py [--first SEED] [--count 100000]

Each seed is one job: some ranks, of our own or under a launcher, each with its manners (it dies of a signal,
saves for a while, ignores it, is stuck in the kernel, fails, leaves), and what comes from outside. Asserted:
the job comes to an end within its time, nothing is left, no rank is killed before its grace is over, the exit
code is that of the first failure. A seed that fails is named, and fails again by itself.
"""

import argparse
import heapq
import os
import random
import signal
import sys
from collections.abc import Callable, Set
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from launch.ending.job_end import SUSPECTS_HAVE_S, JobEnd, Verdict

GRACE_S = 10.0
STUCK_S = 10.0
"""How long ``Termination`` waits for what outlasts SIGKILL."""
LAUNCHER_S = 10.0 + GRACE_S + STUCK_S
TURNS = 3000
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL)


class Rank:
    """A rank with its manners."""

    def __init__(self, random: random.Random) -> None:
        self.manners = random.choices(("dies", "saves", "ignores", "stuck"), (10, 5, 3, 0.2))[0]
        self.takes_s = random.choice((0.0, 0.01, random.uniform(0, 2 * GRACE_S)))
        self.code = random.choice((0, 0, 0, 1, 3))
        self.runs = False
        self.joined_at = 0.0
        self.told_at: float | None = None
        self.leaving = False


class Schedule:
    """One job's life. It is also what carries out the orders."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)  # noqa: S311 - replayable, not secret
        self.now = 0.0
        self.queue: list[tuple[float, int, Callable[[], None]]] = []
        self.number = 0
        self.ranks = [Rank(self.random) for _ in range(self.random.randint(1, 4))]
        self.launcher = self.launcher_runs = self.random.random() < 0.6
        self.launcher_stuck = self.random.random() < 0.05
        self.let_out = False
        self.ends_at: float | None = None
        self.insisted = self.from_outside = self.suspected = False
        self.first: tuple[int, int] | None = None
        self.job = JobEnd(len(self.ranks), self, GRACE_S, lambda: self.now, self.launcher)

    def run(self) -> None:
        """Live it to its end."""
        self._plan()
        turns = 0
        while not self.job.over:
            turns += 1
            assert turns < TURNS, "it turns without end"
            due = self.job.due
            ahead = [when for when in (due, self.queue[0][0] if self.queue else None) if when is not None]
            assert ahead, "it waits for ever"
            if due is None or (self.queue and self.queue[0][0] <= due):
                self.now, _, happen = heapq.heappop(self.queue)
                happen()
            else:
                self.now = max(self.now, due)
            self.job.advance()
        self._judge()

    # What happens

    def _at(self, delay_s: float, happen: Callable[[], None]) -> None:
        self.number += 1
        heapq.heappush(self.queue, (self.now + delay_s, self.number, happen))

    def _plan(self) -> None:
        for number in range(len(self.ranks)):
            late = self.random.choice((0.0, self.random.uniform(0, 3))) if self.launcher else 0.0
            if not (self.launcher and self.random.random() < 0.05):
                self._at(late, lambda number=number: self._start(number))
            code = self.random.choice((0, 0, 1, 7, 255))
            killed = self.random.random() < 0.2
            status = int(signal.SIGSEGV) if killed else code << 8
            self._at(
                late + self.random.uniform(0, 60),
                lambda number=number, status=status: self._finish(number, status),
            )
        for _ in range(self.random.choice((0, 0, 0, 1, 1, 2, 3))):
            number = self.random.choice((*ENDING[:3], signal.SIGUSR1, signal.SIGSTOP))
            self._at(self.random.uniform(0, 60), lambda number=number: self._signal_job(number))
        if self.random.random() < 0.1:
            self._at(self.random.uniform(0, 60), self._hurry)
        if self.random.random() < 0.1:
            self._at(self.random.uniform(0, 60), self._refuse)
        if self.launcher:
            if self.random.random() < 0.2:
                code = self.random.choice((0, 1, 137)) << 8
                self._at(self.random.uniform(0, 60), lambda: self._end_launcher(code))
            self._at(90, lambda: self._end_launcher(0))

    def _start(self, number: int) -> None:
        rank = self.ranks[number]
        if self.launcher and not self.launcher_runs:
            return
        rank.runs, rank.joined_at = True, self.now
        self.job.rank_started(number)

    def _finish(self, number: int, status: int) -> None:
        rank = self.ranks[number]
        if not rank.runs:
            return
        rank.runs = False
        if status and self.first is None:
            self.first = (number, status)
        if status:
            self._must_end()
        if self.random.random() < 0.05 and self.launcher:
            self.first = (
                (number, signal.SIGKILL) if self.first is None or self.first[0] == number else self.first
            )
            self._must_end()
            self.job.rank_lost(number)
        else:
            self.job.rank_ended(number, status)

    def _signal_job(self, number: int) -> None:
        if number in ENDING:
            self.from_outside = True
            self._must_end()
            self.insisted |= self.job.signalled is not None
            self.job.take_ending_signal(number)
        else:
            self.job.pass_on(number)

    def _hurry(self) -> None:
        self.from_outside = self.insisted = True
        self._must_end()
        self.job.abandon("nobody waits for it")

    def _refuse(self) -> None:
        self.from_outside = True
        self._must_end()
        self.job.end(Verdict(1, "refused"), signal.SIGTERM)

    def _end_launcher(self, status: int) -> None:
        """Have the launcher end by itself, which kills the shims; keepers take over and say so."""
        if not self.launcher_runs:
            return
        self.launcher_runs = False
        self.from_outside = True
        self._must_end()
        for number, rank in enumerate(self.ranks):
            if rank.runs:
                self._hit(number, signal.SIGTERM)
                self.job.launcher_ends_rank(number)
        self.job.launcher_ended(status)

    def _must_end(self) -> None:
        self.ends_at = self.now if self.ends_at is None else self.ends_at

    def _hit(self, number: int, signal_number: int) -> None:
        """Have a rank meet a signal, each according to its manners."""
        rank = self.ranks[number]
        if signal_number in ENDING:
            rank.told_at = self.now if rank.told_at is None else rank.told_at
        if not rank.runs or rank.manners == "stuck":
            return
        if signal_number == signal.SIGKILL:
            self._at(0.001, lambda: self._finish(number, signal.SIGKILL))
        elif signal_number in ENDING and rank.manners != "ignores" and not rank.leaving:
            rank.leaving = True
            status = int(signal_number) if rank.manners == "dies" else rank.code << 8
            delay_s = 0.001 if rank.manners == "dies" else rank.takes_s
            self._at(delay_s, lambda: self._finish(number, status))

    # Orders

    def signal_rank(self, rank: int, number: int) -> None:
        """See ``Orders``."""
        found = self.ranks[rank]
        # One that comes once the end has begun has what is left of the others' time.
        in_time = self.ends_at is None or found.joined_at <= self.ends_at
        if number == signal.SIGKILL and found.runs and not self.insisted and in_time:
            assert found.told_at is not None, f"rank {rank} is killed without a word"
            early = found.told_at + GRACE_S - self.now
            assert early < 1e-6, f"rank {rank} is killed {early:.1f} s early"
        self._hit(rank, number)

    def signal_launcher(self, number: int) -> None:
        """See ``Orders``."""
        stuck = self.launcher_stuck and number != signal.SIGKILL
        if self.launcher_runs and number in ENDING and not stuck:
            self._at(0.01, lambda: self._end_launcher(1 << 8))

    def let_go(self) -> None:
        """See ``Orders``."""
        runs = [rank for rank in self.ranks if rank.runs and rank.manners != "stuck"]
        assert not runs, "a rank is let go that runs"
        if not self.launcher_stuck:
            self._at(0.01, self._leave)

    def _leave(self) -> None:
        if self.launcher_runs and not any(rank.runs for rank in self.ranks):
            self.launcher_runs = False
            self.job.launcher_ended(0)

    def note(self, text: str) -> None:
        """See ``Orders``."""

    def describe_end(self, rank: int | None, status: int) -> str:
        """See ``Orders``."""
        return f"{rank} {status}"

    def explain_end(self, rank: int, status: int) -> str:
        """See ``Orders``."""
        return ""

    def find_leaving_before(self, rank: int, others: Set[int]) -> frozenset[int]:
        """See ``Orders``."""
        if self.random.random() < 0.9:
            return frozenset()
        self.suspected = True
        return frozenset(other for other in others if self.random.random() < 0.5)

    # What is asserted

    def _judge(self) -> None:
        stuck = any(rank.runs and rank.manners == "stuck" for rank in self.ranks)
        left = [number for number, rank in enumerate(self.ranks) if rank.runs and rank.manners != "stuck"]
        assert stuck or not left, f"ranks {left} are left"
        assert stuck or not self.launcher_runs, "the launcher is left"
        if self.ends_at is not None:
            took_s = self.now - self.ends_at
            limit_s = SUSPECTS_HAVE_S + GRACE_S + STUCK_S + (LAUNCHER_S if self.launcher else 0)
            assert took_s <= limit_s + 1, f"it took {took_s:.1f} s"
        verdict = self.job.verdict
        if self.first is not None and not self.from_outside and not stuck:
            assert verdict is not None, "a failure was forgotten"
            statuses = self.job.statuses.values()
            codes = {os.waitstatus_to_exitcode(status) for status in statuses if status}
            shell_codes = {128 - code if code < 0 else code for code in codes}
            assert verdict.exit_code in shell_codes | ({1} if self.launcher_stuck else set())
            if not self.suspected:
                number, status = self.first
                code = os.waitstatus_to_exitcode(status)
                assert verdict.rank == number
                assert verdict.exit_code == (128 - code if code < 0 else code), "another failure's code"
        if self.first is None and not self.from_outside and not self.launcher_stuck:
            assert verdict is None, "blame without a failure"


def live(seed: int) -> None:
    """Run one seed.

    Raises:
        AssertionError: With the seed in it.
    """
    try:
        Schedule(seed).run()
    except AssertionError as error:
        raise AssertionError(f"seed {seed}: {error}") from error


def main() -> None:
    """Run many seeds."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=100_000)
    asked = parser.parse_args()
    for seed in range(asked.first, asked.first + asked.count):
        live(seed)
    print(f"{asked.count} schedules from seed {asked.first}: nothing left, nothing waited for for ever")


if __name__ == "__main__":
    main()
