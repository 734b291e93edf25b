"""The receipts of a running job: collected as they come, shown once, saved."""

import json
import os
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launch.model.plan import LaunchPlan
from launch.receipts.elastic_moves import Move, describe_move, read_moves, to_object
from launch.receipts.file import END
from launch.receipts.judge import STAGES, RankReceipt, judge_ranks, read_receipts, to_json
from launch.supervise.children import Children
from launch.supervise.job import RECEIPTS, JobFiles, JobOptions
from launch.system.exit_status import describe_rank, describe_status, exit_code_of
from launch.system.output_file import replace_file

LAST = len(STAGES) - 1
"""The place of the last stage."""


@dataclass(frozen=True)
class Outcome:
    """Tell how a job ended, for ``receipts.json``."""

    exit_code: int
    statuses: Mapping[int, int]
    """Wait statuses of the ranks."""
    cause: str = ""
    """The line that says why the job ended; empty where it ended well."""
    rank: int | None = None
    """The rank that failed first."""
    last_lines: Sequence[str] = ()
    """The lines that this rank wrote last."""

    def to_object(self) -> dict[str, Any]:
        """Convert to what ``receipts.json`` says of it."""
        cause = {"line": self.cause, "rank": self.rank, "last_lines": list(self.last_lines)}
        return {
            "ended": _moment(time.time()),
            "exit_code": self.exit_code,
            "exit_codes": {str(rank): exit_code_of(status) for rank, status in sorted(self.statuses.items())},
            "cause": cause if self.cause else None,
        }


_NOT_ENDED = {"ended": None, "exit_code": None, "exit_codes": None, "cause": None}


class ReceiptWatch:
    """Knows what has arrived and when that is all that will.

    Attributes:
        due: When to show what there is, although ranks are missing (``time.monotonic``).
        receipts: What is known of each rank, in the plan's order.
        settled: Whether every rank has got as far as the job's script lets expect, or has ended.
        level: The stage that every rank has reached, as its place in ``STAGES``; -1 for none.
        over: Whether nothing more is expected; after that only an elastic job's moves are watched.
    """

    def __init__(
        self, plan: LaunchPlan, options: JobOptions, children: Children, files: JobFiles, due: float
    ) -> None:
        self._plan, self._options, self._children, self._files = plan, options, children, files
        self.due = due
        self.receipts: tuple[RankReceipt, ...] = ()
        self.settled = False
        self.level = -1
        self.over = False
        self._wanted = LAST if children.elastic else STAGES.index(options.last_stage)
        self._seen_ns = -1
        self._started_s = time.time()
        self._moves: list[Move] = []
        self._read: set[str] = set()

    def look(self, statuses: Mapping[int, int]) -> None:
        """Read what has arrived.

        Args:
            statuses: Wait statuses of the ranks that have ended.
        """
        ranks = self._plan.ranks
        stages = read_receipts(self._files.receipt_dir, [rank.rank for rank in ranks])
        for number, status in statuses.items():
            stages[number].setdefault(END, {"how": describe_status(status)})
        ranks = tuple(self._children.take_in(rank, stages.get(rank.rank, {})) for rank in ranks)
        world_size = None if self._children.elastic else self._plan.world_size
        self.receipts = judge_ranks(ranks, stages, self._options.numa, world_size)
        levels = [(receipt.rank, _level_of(receipt)) for receipt in self.receipts]
        self.level = min(level for _, level in levels)
        self.settled = all(level >= self._wanted or rank in statuses for rank, level in levels)

    def has_news(self) -> bool:
        """Say whether receipts have come since this was asked last."""
        try:
            changed_ns = self._files.receipt_dir.stat().st_mtime_ns
        except OSError:
            return False
        is_new, self._seen_ns = changed_ns != self._seen_ns, changed_ns
        return is_new

    def refusal(self, settled: bool) -> str | None:
        """Why ``--numa strict`` ends the job, if it does: a missing receipt counts once all is settled."""
        if self._options.numa != "strict":
            return None
        for plan, receipt in zip(self._plan.ranks, self.receipts, strict=True):
            if receipt.verified is False and (settled or "start" in receipt.stages):
                return f"--numa strict: {describe_rank(plan)} is not verified: {'; '.join(receipt.reasons)}"
        return None

    def look_for_moves(self) -> list[str]:
        """Read which ranks of an elastic job have moved or joined; returns what is to be said of it."""
        arrived = read_moves(self._files.receipt_dir, self._read)
        self._read.update(name for name, _ in arrived)
        moves = [move for _, move in arrived if move is not None]
        self._moves += moves
        # In containers the first process of every host has the same number.
        first = {(receipt.host, receipt.pid) for receipt in self.receipts}
        return [
            describe_move(move)
            for move in moves
            if (move.is_elsewhere if move.was_local else (move.host, move.pid) not in first)
        ]

    def save(self, outcome: Outcome | None = None) -> None:
        """Write ``receipts.json`` into the folder for it, if there is one.

        Args:
            outcome: How the job ended, when it is over.

        Raises:
            OSError: If it cannot be written.
        """
        if self._files.record_dir is None:
            return
        document = to_json(self._files.job_id, self.receipts, [to_object(move) for move in self._moves])
        document |= {
            "command": list(self._options.command_line),
            "host": os.uname().nodename,
            "versions": _read_versions(),
            "started": _moment(self._started_s),
            **(_NOT_ENDED if outcome is None else outcome.to_object()),
            "attempt": len(self._options.earlier),
            "earlier_attempts": list(self._options.earlier),
        }
        text = json.dumps(document, indent=1) + "\n"
        for folder in {self._files.record_dir, self._options.job_dir or self._files.record_dir}:
            replace_file(folder / RECEIPTS, text)


def _level_of(receipt: RankReceipt) -> int:
    """How far a rank has got."""
    return max((STAGES.index(stage) for stage in receipt.stages), default=-1)


def _moment(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def _read_versions() -> dict[str, str]:
    """Read what is installed for this Python, which runs the ranks unless ``--python`` says otherwise."""
    # Only a job whose output is kept pays for it.
    from launch.installed.versions import read_tensorflow_version, read_version

    found = {name: read_version(name) for name in ("lmsrun", "horovod")}
    found["tensorflow"] = read_tensorflow_version()
    return {
        "python": platform.python_version(),
        **{name: version for name, version in found.items() if version},
    }
