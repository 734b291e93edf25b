"""What the processes below one are at: stopped, computing, or waiting."""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launch.system.process_tree import read_descendants

_STATE, _USER, _SYSTEM, _CHILDREN_USER, _CHILDREN_SYSTEM = 3, 14, 15, 16, 17
"""Fields of /proc/PID/stat (proc_pid_stat(5)), counted from 1."""


@dataclass(frozen=True)
class Load:
    """A process and all below it."""

    is_stopped: bool
    """Whether one of them is, by a signal or a debugger."""
    cpu_s: float
    """Seconds of CPU that they have used."""
    at_s: float = 0.0
    """When that was, by the clock of their host."""


def read_load(pid: int, proc: Path = Path("/proc"), below: Sequence[int] | None = None) -> Load | None:
    """Look at a process and its descendants (``below``, if they are known); None when it is gone."""
    stopped, ticks = False, 0
    for each in (pid, *(read_descendants(pid, proc) if below is None else below)):
        try:
            text = (proc / str(each) / "stat").read_text(errors="replace")
        except OSError:
            if each == pid:
                return None
            continue
        # The name stands in parentheses and may hold any character.
        fields = text.rpartition(")")[2].split()
        stopped |= fields[_STATE - 3] in "Tt"
        ticks += sum(int(fields[at - 3]) for at in (_USER, _SYSTEM, _CHILDREN_USER, _CHILDREN_SYSTEM))
    return Load(stopped, ticks / os.sysconf("SC_CLK_TCK"), time.monotonic())
