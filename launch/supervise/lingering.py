"""Processes that outlive the first one of their rank, and may still save something.

In a job that is being ended, a shell script that starts the program is such a first process: it dies of
SIGTERM at once, and the program that it has started takes its grace period to write a checkpoint. What ranks
that ended well have left behind has as long.
"""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress

from launch.system.process_tree import group_lives, read_living

_PAUSE_S = 0.05
"""Sets how often the groups are looked at: nothing tells that the last process of one has ended."""
_SETTLES_S = 0.2
"""Limits how long what ends with its rank, such as a helper of Python's multiprocessing, may take for it."""


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


class LeftBehind:
    """Ends what ranks that ended well have left behind, by SIGTERM; what is left of it later is swept up.

    Attributes:
        count: How many processes were signalled.
    """

    def __init__(self, grace_s: float) -> None:
        """Begin to wait.

        Args:
            grace_s: How long they have after SIGTERM, in seconds.
        """
        self.count = 0
        self._grace_s = grace_s
        self._until = time.monotonic() + _SETTLES_S

    def lives(self) -> bool:
        """Signal what is there when that is due; returns whether there is something to wait for."""
        living = read_living(os.getpid())
        if living and not self.count and time.monotonic() >= self._until:
            self.count = len(living)
            self._until = time.monotonic() + self._grace_s
            for pid in living:
                for number in (signal.SIGTERM, signal.SIGCONT):  # what is stopped is to take note
                    with suppress(ProcessLookupError, PermissionError):
                        os.kill(pid, number)
        return bool(living) and time.monotonic() < self._until

    @property
    def due(self) -> float:
        """When to look again, by the monotonic clock."""
        return time.monotonic() + _PAUSE_S
