"""The receipts of a running job towards the user: looked at in time, one table, told moves, one file."""

import time
from collections.abc import Callable, Mapping, Sequence, Set

from launch.model.plan import LaunchPlan
from launch.receipts.judge import RankReceipt
from launch.supervise.children import Children
from launch.supervise.job import JobFiles, JobOptions
from launch.supervise.receipt_watch import LAST, Outcome, ReceiptWatch
from launch.supervise.streams import Console

_POLL_S = 0.1
_LATER_POLL_S = 1.0
"""When the table has been shown and may be shown again."""


class ReceiptDisplay:
    """Shows what a watch has collected. Use one a job.

    Attributes:
        lost: Whether ``receipts.json`` could not be written.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        options: JobOptions,
        children: Children,
        files: JobFiles,
        render: Callable[[Sequence[RankReceipt]], str],
        console: Console,
    ) -> None:
        self._render, self._console = render, console
        self._is_elastic, self._quiet = children.elastic, options.quiet
        due = time.monotonic() + options.receipt_timeout_s
        self._watch = ReceiptWatch(plan, options, children, files, due)
        self._next_look = 0.0
        self._shown: int | None = None
        self.lost = False

    @property
    def due(self) -> float | None:
        """When to look next (``time.monotonic``); None: there is nothing to come."""
        return self._next_look if self._watching else None

    @property
    def receipts(self) -> tuple[RankReceipt, ...]:
        """What is known of each rank, in the plan's order."""
        return self._watch.receipts

    def look(self, statuses: Mapping[int, int], late: bool) -> str | None:
        """Show the table, when there is something to show.

        Args:
            statuses: Wait statuses of the ranks that have ended.
            late: Nothing more will come.

        Returns:
            Why ``--numa strict`` ends the job, if it does.
        """
        now = time.monotonic()
        if not self._watching or (now < self._next_look and not late):
            return None
        # Each look opens three files a rank, so the ranks' output must not set the pace.
        self._next_look = now + (_POLL_S if self._shown is None else _LATER_POLL_S)
        if self._watch.over:
            self._tell_moves()
            return None
        if self._shown is not None and not self._watch.has_news():
            return None
        self._watch.look(statuses)
        settled = self._watch.settled or late or now >= self._watch.due
        refusal = self._watch.refusal(settled)
        if settled and self._is_worth_a_table(late):
            self._show(frozenset(statuses))
            if self._is_elastic:
                self._tell_moves()
        return refusal

    def _is_worth_a_table(self, late: bool) -> bool:
        """Say whether the table has not been shown, or would tell of every rank what was not known then."""
        if self._shown is None:
            return True
        return self._watch.level > self._shown and (late or self._watch.level == LAST)

    @property
    def _watching(self) -> bool:
        return not self._watch.over or self._is_elastic

    def _show(self, ended: Set[int]) -> None:
        # A rank that ended before its receipt is not bound wrongly, and the job's last line speaks of it.
        unverified = [receipt for receipt in self._watch.receipts if receipt.verified is False]
        if not self._quiet or any("start" in one.stages or one.rank not in ended for one in unverified):
            self._print()
        self._save()
        self._shown = self._watch.level
        self._watch.over = self._is_elastic or self._shown == LAST

    def _print(self) -> None:
        table = self._render(self._watch.receipts)
        self._console.note(f"lmsrun: where the ranks run, as read back from the kernel\n{table}")

    def _tell_moves(self) -> None:
        if lines := self._watch.look_for_moves():
            for line in lines:
                self._console.note(f"lmsrun: {line}")
            self._save()

    def conclude(self, outcome: Outcome) -> None:
        """Write down how the job ended."""
        if not self.lost:
            self._save(outcome)

    def _save(self, outcome: Outcome | None = None) -> None:
        try:
            self._watch.save(outcome)
        except OSError as error:
            self.lost = True
            self._console.note(f"lmsrun: error: cannot write {error.filename}: {error.strerror}")
