"""Ranks that still save something: their first process has ended with the job, and others of theirs have not.

A shell script that starts the program is such a first process: it dies of SIGTERM at once, and the program
that it has started takes its grace period to write a checkpoint.
"""

import os
import time
from collections.abc import Iterator
from contextlib import suppress

from launch.system.process_tree import group_lives

_PAUSE_S = 0.05
"""Sets how often the groups are looked at: nothing tells that the last process of one has ended."""


class Lingering:
    """Keeps the ranks whose group outlives the process that leads it."""

    def __init__(self) -> None:
        self._left: dict[int, tuple[int, int]] = {}

    def take(self, rank: int, pid: int, status: int) -> bool:
        """Keep a rank whose first process has ended, if others of its group have not."""
        if group_lives(pid):
            self._left[rank] = pid, status
        return rank in self._left

    def signal(self, rank: int, number: int) -> None:
        """Signal the group of a rank; of one that is not kept none is left."""
        if rank in self._left:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._left[rank][0], number)

    def ended(self, *, all_of_them: bool = False) -> Iterator[tuple[int, int]]:
        """Yield each rank of which no process is left, with the wait status of its first one."""
        for rank, (pid, status) in list(self._left.items()):
            if all_of_them or not group_lives(pid):
                del self._left[rank]
                yield rank, status

    @property
    def due(self) -> float | None:
        """When to look again, by the monotonic clock."""
        return time.monotonic() + _PAUSE_S if self._left else None
