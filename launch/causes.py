"""Why a rank ended: its wait status in words, and what the kernel's own counters say of memory."""

import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from launch.plan import RankPlan

_CGROUP_MOUNT = "sys/fs/cgroup"
_MACHINE, _CGROUP = "the machine's memory", "the cgroup's memory limit"


@dataclass(frozen=True)
class MemoryCounters:
    """Out-of-memory kills so far: of this cgroup, and of the whole machine. Absent ones are unknown."""

    kills: Mapping[str, int] = field(default_factory=dict)
    limit_hits: int | None = None
    """How often the cgroup ran into its limit (version 1 ``failcnt``, version 2 ``memory.events`` max)."""


def read_memory_counters(root: Path = Path("/")) -> MemoryCounters:
    """Read the counters of the calling process's cgroup (version 1 or 2) and of the machine."""
    kills: dict[str, int] = {}
    hits: int | None = None
    machine = _read_pairs(root / "proc/vmstat").get("oom_kill")
    if machine is not None:
        kills[_MACHINE] = machine
    for line in _read_text(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "" and path:
            events = _read_pairs(root / _CGROUP_MOUNT / path.lstrip("/") / "memory.events")
            if "oom_kill" in events:
                kills[_CGROUP] = events["oom_kill"]
                hits = events.get("max", hits)
        elif "memory" in controllers.split(","):
            folder = _cgroup_v1_folder(root, path)
            control = _read_pairs(folder / "memory.oom_control")
            if "oom_kill" in control:
                kills[_CGROUP] = control["oom_kill"]
            hits = _read_number(folder / "memory.failcnt", hits)
    return MemoryCounters(kills, hits)


def explain_memory(before: MemoryCounters, after: MemoryCounters, plan: RankPlan) -> str:
    """What the kernel did about memory between two readings, as the end of a sentence, or empty."""
    struck = [name for name, count in after.kills.items() if count > before.kills.get(name, count)]
    if struck:
        # A cgroup kill counts for the machine too; the narrower reason is the better one.
        reason = f"; the kernel's out-of-memory killer struck ({struck[-1]})"
        if plan.mem_policy == "bind" and struck[-1] == _MACHINE:
            # A bound rank is struck while other nodes have memory left: the policy never spills.
            nodes = ",".join(map(str, sorted(plan.mem_nodes)))
            reason += f"; its memory was bound to node {nodes}, try --mem-policy preferred"
        return reason
    if before.limit_hits is not None and (after.limit_hits or 0) > before.limit_hits:
        return "; the cgroup ran into its memory limit meanwhile"
    return ""


def describe_status(status: int) -> str:
    """A wait status in words: ``exited with code 7``, ``was killed by SIGSEGV (signal 11)``."""
    if not os.WIFSIGNALED(status):
        return f"exited with code {os.waitstatus_to_exitcode(status)}"
    core = ", core dumped" if os.WCOREDUMP(status) else ""
    return f"was killed by {signal_name(os.WTERMSIG(status))} (signal {os.WTERMSIG(status)}){core}"


def exit_code_of(status: int) -> int:
    """A shell's exit code for a wait status: the code itself, or 128 + signal."""
    code = os.waitstatus_to_exitcode(status)
    return 128 - code if code < 0 else code


def describe_rank(plan: RankPlan) -> str:
    """Such as ``rank 1 on localhost (GPU 0004:05:00.0)``."""
    gpu = "no GPU" if plan.gpu is None else f"GPU {plan.gpu.pci_bus_id}"
    return f"rank {plan.rank} on {plan.host} ({gpu})"


def signal_name(number: int) -> str:
    """``SIGINT``, or ``signal 40`` for those without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _cgroup_v1_folder(root: Path, path: str) -> Path:
    """In a container the path is the host's, and the mount shows the container's own cgroup at its top."""
    folder = root / _CGROUP_MOUNT / "memory" / path.lstrip("/")
    return folder if folder.is_dir() else root / _CGROUP_MOUNT / "memory"


def _read_pairs(path: Path) -> dict[str, int]:
    pairs = {}
    for line in _read_text(path).splitlines():
        name, _, value = line.partition(" ")
        if value.strip().isdigit():
            pairs[name] = int(value)
    return pairs


def _read_number(path: Path, otherwise: int | None) -> int | None:
    text = _read_text(path).strip()
    return int(text) if text.isdigit() else otherwise


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
