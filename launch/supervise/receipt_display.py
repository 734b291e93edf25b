"""The receipts of a running job towards the user: looked at in time, one table, told moves, one file."""

import time
from collections.abc import Callable, Mapping, Sequence

from launch.model.plan import LaunchPlan
from launch.receipts.judge import RankReceipt
from launch.supervise.job import JobFiles, JobOptions
from launch.supervise.receipt_watch import ReceiptWatch
from launch.supervise.streams import Console
from launch.system.exit_status import describe_status

_POLL_S = 0.1


class ReceiptDesk:
    """Shows what a watch has collected. Use one a job.

    Attributes:
        lost: Whether ``receipts.json`` could not be written.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        options: JobOptions,
        files: JobFiles,
        render: Callable[[Sequence[RankReceipt]], str],
        console: Console,
    ) -> None:
        self._options, self._render, self._console = options, render, console
        self._watch = ReceiptWatch(plan, options, files, time.monotonic() + options.receipt_timeout_s)
        self._next_look = 0.0
        self.lost = False

    @property
    def due(self) -> float | None:
        """When to look next (``time.monotonic``); None: there is nothing to come."""
        return self._next_look if self._watching else None

    def look(self, statuses: Mapping[int, int], late: bool) -> str | None:
        """Show the table, when there is something to show.

        Args:
            statuses: Wait statuses of ranks that have ended; of the launcher, where another one starts them.
            late: Nothing more will come.

        Returns:
            Why ``--numa strict`` ends the job, if it does.
        """
        now = time.monotonic()
        if not self._watching or (now < self._next_look and not late):
            return None
        # Each look opens three files a rank, so the ranks' output must not set the pace.
        self._next_look = now + _POLL_S
        if self._watch.over:
            self._tell_moves()
            return None
        launcher_over = self._options.command is not None and bool(statuses)
        ended = {rank: describe_status(status) for rank, status in statuses.items()}
        self._watch.look(ended, launcher_over)
        settled = self._watch.settled or late or now >= self._watch.due
        refusal = self._watch.refusal(settled)
        if settled:
            self._show()
            if self._is_elastic:
                self._tell_moves()
        return refusal

    @property
    def _watching(self) -> bool:
        return not self._watch.over or self._is_elastic

    @property
    def _is_elastic(self) -> bool:
        command = self._options.command
        return command is not None and command.elastic

    def _show(self) -> None:
        table = self._render(self._watch.receipts)
        self._console.note(f"lmsrun: where the ranks run, as read back from the kernel\n{table}")
        self._save()

    def _tell_moves(self) -> None:
        if lines := self._watch.look_for_moves():
            for line in lines:
                self._console.note(f"lmsrun: {line}")
            self._save()

    def _save(self) -> None:
        try:
            self._watch.save()
        except OSError as error:
            self.lost = True
            self._console.note(f"lmsrun: error: cannot write {error.filename}: {error.strerror}")
