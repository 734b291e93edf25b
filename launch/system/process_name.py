"""The name under which a process stands in lists of processes."""

import ctypes
from pathlib import Path

_PR_SET_NAME = 15
"""include/uapi/linux/prctl.h"""
_ARG_START, _ARG_END = 48, 49
"""Fields of /proc/PID/stat (proc_pid_stat(5)), counted from 1."""


def rename_process(name: str) -> None:
    """Give this process a name and a command line of its own, so that nobody takes it for what forked it.

    A guard that ``pkill lmsrun`` finds together with what it guards would be none.
    """
    ctypes.CDLL(None).prctl(_PR_SET_NAME, ctypes.c_char_p(name.encode()), 0, 0, 0)
    # The process's own name stands in parentheses and may hold any character.
    try:
        fields = Path("/proc/self/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:  # without /proc nobody sees a command line
        return
    start, end = int(fields[_ARG_START - 3]), int(fields[_ARG_END - 3])
    if 0 < start < end:
        text = name.encode()[: end - start - 1]
        ctypes.memset(start, 0, end - start)
        ctypes.memmove(start, text, len(text))
