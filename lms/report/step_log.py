"""``LMS_STATS_FILE``: a CSV line for each training step, of Keras, a loop or a session."""

import csv
import logging
import os
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lms.config import STATS_OWNER_VARIABLE
from lms.transports.base import StoreStats
from lms.user_files import require_file

logger = logging.getLogger("lms")

COLUMNS = ("step", "name", "duration_s", "swap_outs", "swap_ins", "bytes_out", "bytes_in", "peak_bytes")

_written: set[tuple[int, Path]] = set()
"""Files that a process, by its number, has written: LMS may be switched off and on again."""

Counters = Callable[[], tuple[StoreStats | None, int | None]]
"""What has been moved so far (None where nothing counts it), and the peak of device memory since the edit."""


class StepLog:
    """Writes a line for each call of a planned step.

    Args:
        path: The file; the process's first step writes it anew. Of several ranks each has its own,
            ``steps.rank1.csv``, and so has a process where another one uses the file, ``steps.4711.csv``.
        environ: Where this process's rank stands.
        counters: Asked before and after each step.
        warn: Told once that the file cannot be written any more; training goes on.

    Raises:
        PlaceError: If the file cannot be written.
    """

    def __init__(
        self,
        path: str,
        environ: Mapping[str, str],
        counters: Counters,
        warn: Callable[[str], object] = logger.warning,
    ) -> None:
        self.path = self._wanted = rank_path(Path(os.path.abspath(path)), environ)
        self._found = _stamp(self._wanted)
        self._writer = self._steps = 0
        self._is_new, self._is_broken = True, False
        self._counters, self._warn = counters, warn
        self._planned: weakref.WeakSet[Any] = weakref.WeakSet()
        require_file(self._wanted, "stats_file (LMS_STATS_FILE)")

    def planned(self, owner: Any) -> None:
        """Note that ``owner``, a function or a session's graph, holds a training step."""
        self._planned.add(owner)

    def run(self, owner: Any, name: str, step: Callable[[], Any], *, idle: bool = True) -> Any:
        """Run ``step`` and write its line, if ``owner`` turns out to hold a training step.

        Args:
            owner: The function or graph that runs.
            name: What the line calls it.
            step: The call.
            idle: Write a line also if it is known that nothing was moved.
        """
        before, _ = self._counters()
        started_s = time.perf_counter()
        result = step()
        duration_s = time.perf_counter() - started_s
        after, peak = self._counters()
        if owner in self._planned and not self._is_broken and (idle or after is None or after != before):
            try:
                self._write(name, duration_s, before, after, peak)
            except OSError as error:
                self._is_broken = True
                why = error.strerror or error
                self._warn(f"stats_file (LMS_STATS_FILE): cannot write {self.path}: {why}")
        return result

    def _write(
        self,
        name: str,
        duration_s: float,
        before: StoreStats | None,
        after: StoreStats | None,
        peak: int | None,
    ) -> None:
        moved = ["", "", "", ""]
        if after is not None:
            earlier = before or StoreStats()
            moved = [str(getattr(after, column) - getattr(earlier, column)) for column in COLUMNS[3:7]]
        if self._writer != os.getpid():
            self._choose()
        row = [self._steps, name, f"{duration_s:.6f}", *moved, "" if peak is None else peak]
        # Made with the first line: processes that a rank starts import TensorFlow too, and train nothing.
        with self.path.open("w" if self._is_new else "a", newline="") as file:
            csv.writer(file).writerows([COLUMNS, row] if self._is_new else [row])
        self._steps, self._is_new = self._steps + 1, False

    def _choose(self) -> None:
        """Choose this process's file, and tell the processes that it starts.

        The file is another's where a process that has started this one writes it, or any has written it since
        this one switched LMS on. Where no other file can be made, lines are appended to it.
        """
        self._writer, path, self._is_new = os.getpid(), self._wanted, True
        _, _, owned = os.environ.get(STATS_OWNER_VARIABLE, "").partition(":")
        is_used = owned == str(path) or _stamp(path) != self._found
        if is_used and path.is_file() and (self._writer, path) not in _written:
            own = path.with_name(f"{path.stem}.{self._writer}{path.suffix}")
            self._is_new = os.access(path.parent, os.W_OK)
            path = own if self._is_new else path
        else:
            os.environ[STATS_OWNER_VARIABLE] = f"{self._writer}:{path}"
        self.path, self._steps = path, 0
        if (self._writer, path) in _written and _stamp(path)[1]:
            self._is_new = False
            with path.open(newline="") as file:
                self._steps = sum(1 for _ in file) - 1
        _written.add((self._writer, path))


def _stamp(path: Path) -> tuple[int, int]:
    """Return when a file was written, in ns, and its bytes: 0 where there is none."""
    try:
        found = path.stat()
    except OSError:
        return 0, 0
    return found.st_mtime_ns, found.st_size


def rank_path(path: Path, environ: Mapping[str, str]) -> Path:
    """Put this process's rank into the file name, before its ending, where there are several ranks."""
    size, rank = environ.get("WORLD_SIZE", ""), environ.get("RANK", "")
    several = size.isdigit() and int(size) > 1 and rank.isdigit()
    return path.with_name(f"{path.stem}.rank{rank}{path.suffix}") if several else path
