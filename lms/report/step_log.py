"""``LMS_STATS_FILE``: a CSV line for each training step, of Keras, a loop or a session."""

import csv
import os
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lms.transports.base import StoreStats
from lms.user_paths import require_file

COLUMNS = ("step", "name", "duration_s", "swap_outs", "swap_ins", "bytes_out", "bytes_in", "peak_bytes")

OWNER = "LMS_STATS_OWNER"
"""Tells the processes that one starts which file it writes: its number, a colon and the file."""

_lines: dict[Path, int] = {}
"""How many steps this process has written into each file: LMS may be switched off and on again."""

Counters = Callable[[], tuple[StoreStats | None, int | None]]
"""What has been moved so far (None where nothing counts it), and the peak of device memory since the edit."""


class StepLog:
    """Writes a line for each call of a planned step.

    Args:
        path: The file; the process's first step writes it anew. Of several ranks each has its own,
            ``steps.rank1.csv``, and so has a process that one with this file has started, ``steps.4711.csv``.
        environ: Where this process's rank stands.
        counters: Asked before and after each step.

    Raises:
        PlaceError: If the file cannot be written.
    """

    def __init__(self, path: str, environ: Mapping[str, str], counters: Counters) -> None:
        self.path = _own_path(rank_path(Path(os.path.abspath(path)), environ))
        self._counters = counters
        self._planned: weakref.WeakSet[Any] = weakref.WeakSet()
        require_file(self.path, "stats_file (LMS_STATS_FILE)")

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
        if owner in self._planned and (idle or after is None or after != before):
            self._write(name, duration_s, before, after, peak)
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
        steps = _lines.get(self.path, 0)
        row = [steps, name, f"{duration_s:.6f}", *moved, "" if peak is None else peak]
        # Made with the first line: processes that a rank starts import TensorFlow too, and train nothing.
        with self.path.open("a" if steps else "w", newline="") as file:
            csv.writer(file).writerows([row] if steps else [COLUMNS, row])
        _lines[self.path] = steps + 1


def _own_path(path: Path) -> Path:
    """Return the file for this process, and tell the processes that it starts."""
    owner, _, owned = os.environ.get(OWNER, "").partition(":")
    if owned == str(path) and owner != str(os.getpid()):
        return path.with_name(f"{path.stem}.{os.getpid()}{path.suffix}")
    os.environ[OWNER] = f"{os.getpid()}:{path}"
    return path


def rank_path(path: Path, environ: Mapping[str, str]) -> Path:
    """Put this process's rank into the file name, before its ending, where there are several ranks."""
    size, rank = environ.get("WORLD_SIZE", ""), environ.get("RANK", "")
    several = size.isdigit() and int(size) > 1 and rank.isdigit()
    return path.with_name(f"{path.stem}.rank{rank}{path.suffix}") if several else path
