"""Where a rank stands, told while it trains: in a small file for ``lmsrun top``, and for TensorBoard.

A step costs two readings of the clock; figures are read and written once a second at most, and not synced.
"""

import json
import os
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from lms.report.stats import Report
from lms.user_files import require_folder

SCHEMA = "lms.status/1"
PERIOD_S = 1.0
RECEIPT_DIR = "LMSRUN_RECEIPT_DIR"
"""The private folder of a job on this host, as ``lmsrun`` names it to its ranks."""


@dataclass(frozen=True)
class Status:
    """The figures of a process that trains. Bytes that nothing counts are ``None``."""

    steps: int
    """Training steps so far."""
    step_s: float
    """Seconds of a step, the mean since the status before."""
    in_use_bytes: int | None
    peak_bytes: int | None
    planned_peak_bytes: int | None
    limit_bytes: int | None
    bytes_out: int
    """Moved to the host so far; on a GPU, where nothing counts the copies, by the plan."""
    bytes_in: int

    @classmethod
    def of(cls, steps: int, step_s: float, report: Report, *, counts: bool) -> "Status":
        """Collect the figures from a report."""
        memory = report.device.memory()
        edited = report.edited[-1] if report.edited else None
        planned = (steps * edited.bytes_out, steps * edited.bytes_in) if edited else (0, 0)
        out, back = (report.store.bytes_out, report.store.bytes_in) if counts else planned
        return cls(
            steps,
            step_s,
            None if memory is None else memory[0],
            None if memory is None else memory[1],
            report.planned_peak_bytes,
            report.device.limit_bytes,
            out,
            back,
        )


class Sink(Protocol):
    """One place where the status goes."""

    def write(self, status: Status, report: Report) -> None:
        """Write it.

        Raises:
            OSError: If that cannot be done; the place is left alone from then on.
        """


class StepStatus:
    """Tells the status of a process after its training steps.

    Args:
        sinks: Where it goes.
        read: Returns what LMS did so far, and whether the copies are counted.
        clock: Seconds.
    """

    def __init__(
        self,
        sinks: Sequence[Sink],
        read: Callable[[], tuple[Report, bool]],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._sinks, self._read, self._clock = list(sinks), read, clock
        self._planned: weakref.WeakSet[Any] = weakref.WeakSet()
        self._steps = self._told_steps = 0
        self._seconds = self._due = 0.0

    def planned(self, owner: Any) -> None:
        """Note that ``owner``, a function or a session's graph, holds a training step."""
        self._planned.add(owner)

    def run(self, owner: Any, step: Callable[[], Any]) -> Any:
        """Run ``step``, and tell the status if it is due and ``owner`` turns out to hold a training step."""
        started = self._clock()
        result = step()
        now = self._clock()
        if owner in self._planned:
            self._steps += 1
            self._seconds += now - started
            if now >= self._due and self._sinks:
                self._due = now + PERIOD_S
                self._tell()
        return result

    def _tell(self) -> None:
        report, counts = self._read()
        mean = self._seconds / (self._steps - self._told_steps)
        status = Status.of(self._steps, mean, report, counts=counts)
        self._told_steps, self._seconds = self._steps, 0.0
        for sink in tuple(self._sinks):
            try:
                sink.write(status, report)
            except OSError:  # the job is about to end, or the disk is full: training goes on
                self._sinks.remove(sink)


class StatusFile:
    """A file of JSON in the job's private folder, replaced as a whole.

    Args:
        folder: The job's folder.
        rank: The process's rank.
    """

    def __init__(self, folder: Path, rank: str) -> None:
        self._path = folder / f"lms-status.{rank}.json"
        self._draft = folder / f".lms-status.{rank}.{os.getpid()}"

    def write(self, status: Status, report: Report) -> None:
        """Replace the file."""
        content = {"schema": SCHEMA, "pid": os.getpid(), "time": time.time(), **asdict(status)}
        self._draft.write_text(json.dumps(content), encoding="ascii")
        os.replace(self._draft, self._path)


class Board:
    """Scalars and texts for TensorBoard; the file is made with the first step.

    Args:
        folder: Where TensorBoard looks; of several ranks each has a folder of its own in it.
        environ: Where this process's rank and its receipts stand.

    Raises:
        PlaceError: If nothing can be written there.
    """

    def __init__(self, folder: str, environ: Mapping[str, str]) -> None:
        several = environ.get("WORLD_SIZE", "1") != "1" and environ.get("RANK", "").isdigit()
        self._folder = Path(folder, f"rank-{environ['RANK']}") if several else Path(folder)
        self._environ = environ
        self._file: Any = None
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            pass
        require_folder(self._folder, "tensorboard (LMS_TENSORBOARD)")

    def write(self, status: Status, report: Report) -> None:
        """Write the scalars, and with the first of them the report and the receipts as texts."""
        if self._file is None:
            from lms.report.event_file import EventFile

            self._file = EventFile(self._folder)
            self._file.text(status.steps, "lms/report", f"```\n{report}\n```")
            for name, text in _receipts(self._environ):
                self._file.text(status.steps, f"lmsrun/receipt/{name}", f"```\n{text}\n```")
        mib = {
            name: None if value is None else value / (1 << 20)
            for name, value in asdict(status).items()
            if name.endswith("bytes") or name.startswith("bytes")
        }
        scalars = {f"lms/{name.replace('bytes', 'MiB')}": value for name, value in mib.items()}
        self._file.scalars(status.steps, {"lms/step_seconds": status.step_s, **scalars})
        self._file.flush()


def _receipts(environ: Mapping[str, str]) -> list[tuple[str, str]]:
    folder, rank = environ.get(RECEIPT_DIR), environ.get("RANK", "")
    if not folder:
        return []
    found = []
    for path in sorted(Path(folder).glob(f"rank-{rank}.*.json")):
        found.append((path.name.split(".")[1], path.read_text(encoding="utf-8")))
    return found


def open_status(
    tensorboard: str | None, environ: Mapping[str, str], read: Callable[[], tuple[Report, bool]]
) -> StepStatus | None:
    """Return what tells the status of this process; ``None`` where nobody wants to know.

    Args:
        tensorboard: A folder for TensorBoard.
        environ: The process's variables.
        read: Returns what LMS did so far, and whether the copies are counted.

    Raises:
        PlaceError: If nothing can be written into the folder.
    """
    sinks: list[Sink] = []
    folder, rank = environ.get(RECEIPT_DIR, ""), environ.get("RANK", "")
    if rank.isdigit() and os.path.isdir(folder):
        sinks.append(StatusFile(Path(folder), rank))
    if tensorboard:
        sinks.append(Board(tensorboard, environ))
    return StepStatus(sinks, read) if sinks else None
