"""Keeping hold of every process of a job: parent-death signals, subreapers, and the sweep at the end."""

import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
"""include/uapi/linux/prctl.h"""

_SWEEP_PAUSE_S = 0.005
_MAX_GENERATIONS = 64
"""Ancestors that are looked at."""


def die_with_parent(death_signal: int, parent: int) -> None:
    """Have the kernel send this process a signal when ``parent`` dies; it survives exec.

    A parent that died before the call would never trigger it, so that case ends this process here.
    """
    _prctl(_PR_SET_PDEATHSIG, death_signal)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def adopt_orphans() -> None:
    """Make this process the new parent of every descendant whose own parent dies, also after setsid."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def reap_children() -> Iterator[tuple[int, int]]:
    """Take the status of every child that has ended, adopted orphans too, and yield (process id, status)."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        yield pid, status


def read_children(pid: int, proc: Path = Path("/proc")) -> set[int]:
    """Read the direct children of every thread of a process; empty when it is gone."""
    try:
        tasks = list(os.scandir(proc / str(pid) / "task"))
    except OSError:
        return set()
    children: set[int] = set()
    for task in tasks:
        try:
            children.update(map(int, Path(task.path, "children").read_text().split()))
        except FileNotFoundError:
            return _children_by_stat(pid, proc) if (proc / str(pid)).exists() else set()
        except (OSError, ValueError):
            continue
    return children


def read_descendants(pid: int, proc: Path = Path("/proc"), spare: frozenset[int] = frozenset()) -> list[int]:
    """Every descendant, parents first. ``spare`` names children that are left alone with all below them."""
    found: list[int] = []
    ahead = sorted(read_children(pid, proc) - spare)
    while ahead:
        found += ahead
        ahead = sorted({child for parent in ahead for child in read_children(parent, proc)} - set(found))
    return found


def read_living(pid: int, proc: Path = Path("/proc")) -> list[int]:
    """Read which descendants have not ended; one whose status nobody has taken yet has."""
    return [each for each in read_descendants(pid, proc) if _read_state(each, proc) not in ("", "X", "Z")]


def sweep(
    limit_s: float,
    spare: frozenset[int] = frozenset(),
    clock: Callable[[], float] = time.monotonic,
) -> list[int]:
    """Kill and reap every descendant of this process, which must have called ``adopt_orphans``.

    As parents die their children come to this process, so the walk ends when it has no child left.

    Args:
        limit_s: How long to go on; a process in an uninterruptible system call can outlast any signal.
        spare: Children from before the job, left alone.
        clock: Seconds.

    Returns:
        The processes that would not die within the limit.
    """
    end = clock() + limit_s
    while left := read_descendants(os.getpid(), spare=spare):
        if clock() > end:
            return left
        for pid in left:
            _kill(pid, signal.SIGKILL)
        _reap(spare)
        time.sleep(_SWEEP_PAUSE_S)
    return []


def signal_group(pid: int, number: int) -> None:
    """Signal the process group that ``pid`` leads; none left is no error."""
    try:
        os.killpg(pid, number)
    except (ProcessLookupError, PermissionError):
        _kill(pid, number)


def group_lives(pid: int) -> bool:
    """Tell whether a process of the group is left that ``pid`` leads, or led."""
    try:
        os.killpg(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # one that became somebody else's
        pass
    return True


def _reap(spare: frozenset[int]) -> None:
    for pid in read_children(os.getpid()) - spare:
        try:
            os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            continue


def find_launcher(names: Sequence[str], environ: Mapping[str, str], proc: Path = Path("/proc")) -> int:
    """Find the process that started this rank: its nearest ancestor in whose environment the rank's is not.

    Shells and containers' starters may stand between. One whose environment cannot be read ends the search.

    Args:
        names: Variables by which the launcher tells its ranks and jobs apart.
        environ: This process's own.
        proc: Where the kernel shows processes.

    Returns:
        Its process id; this process's parent where nothing better is known.
    """
    own = {f"{name}={environ[name]}".encode() for name in names if name in environ}
    parent = pid = os.getppid()
    parents = dict(_parents(proc)) if own else {}
    for _ in range(_MAX_GENERATIONS):
        try:
            if not own <= set((proc / str(pid) / "environ").read_bytes().split(b"\0")):
                return pid
            pid = parents[pid]
        except (OSError, KeyError):
            break
    return parent


def _read_state(pid: int, proc: Path) -> str:
    """Read the letter that the kernel has for what a process does; empty when it is gone."""
    try:
        text = (proc / str(pid) / "stat").read_text()
    except OSError:
        return ""
    return text.rpartition(")")[2].split()[0]


def _kill(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        pass


def _children_by_stat(pid: int, proc: Path) -> set[int]:
    """For kernels without CONFIG_PROC_CHILDREN: every process whose parent is ``pid``."""
    return {child for child, parent in _parents(proc) if parent == pid}


def _parents(proc: Path) -> Iterator[tuple[int, int]]:
    for entry in os.scandir(proc):
        if entry.name.isdigit():
            try:
                text = (proc / entry.name / "stat").read_text()
            except OSError:
                continue
            # The name stands in parentheses and may hold any character, so count from the last one.
            yield int(entry.name), int(text.rpartition(")")[2].split()[1])


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")
