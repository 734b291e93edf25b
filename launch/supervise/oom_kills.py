"""What the kernel's own counters say of memory that ran out."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from launch.discover.limits import read_cgroup_folders
from launch.discover.tree import DirTree, Tree
from launch.model.plan import RankPlan

_MACHINE, _CGROUP = "the machine's memory", "the cgroup's memory limit"


@dataclass(frozen=True)
class MemoryCounters:
    """Out-of-memory kills so far: of this cgroup, and of the whole machine. Absent ones are unknown."""

    kills: Mapping[str, int] = field(default_factory=dict)
    limit_hits: int | None = None
    """How often the cgroup ran into its limit (version 1 ``failcnt``, version 2 ``memory.events`` max)."""


def read_memory_counters(tree: Tree | None = None) -> MemoryCounters:
    """Read the counters of the calling process's cgroup (version 1 or 2) and of the machine.

    Args:
        tree: Where ``proc/`` and ``sys/`` are; None is this machine.
    """
    tree = tree or DirTree("/")
    kills: dict[str, int] = {}
    machine = _read_pairs(tree, "proc/vmstat").get("oom_kill")
    if machine is not None:
        kills[_MACHINE] = machine
    for folder in read_cgroup_folders(tree, "memory"):
        # The first that says anything is the process's own; those above count other jobs' kills too.
        counted = _read_pairs(tree, f"{folder}/memory.events") or _read_pairs(
            tree, f"{folder}/memory.oom_control"
        )
        hits = counted.get("max", _read_number(tree, f"{folder}/memory.failcnt"))
        if "oom_kill" in counted:
            kills[_CGROUP] = counted["oom_kill"]
        if "oom_kill" in counted or hits is not None:
            return MemoryCounters(kills, hits)
    return MemoryCounters(kills)


def explain_memory(before: MemoryCounters, after: MemoryCounters, plan: RankPlan | None = None) -> str:
    """Explain why SIGKILL came between two readings, as the end of a sentence, or empty.

    Args:
        before: When the rank started.
        after: When it was killed.
        plan: The rank's; None: not known here.
    """
    struck = [name for name, count in after.kills.items() if count > before.kills.get(name, count)]
    if struck:
        # A cgroup kill counts for the machine too; the narrower reason is the better one.
        reason = f"; the kernel's out-of-memory killer struck ({struck[-1]})"
        if plan and plan.mem_policy == "bind" and struck[-1] == _MACHINE:
            # A bound rank is struck while other nodes have memory left: the policy never spills.
            nodes = ",".join(map(str, sorted(plan.mem_nodes)))
            reason += f"; its memory was bound to node {nodes}, try --mem-policy preferred"
        return reason
    if before.limit_hits is not None and (after.limit_hits or 0) > before.limit_hits:
        return "; the cgroup ran into its memory limit meanwhile"
    return "" if after.kills else "; often that is the kernel's out-of-memory killer"


def _read_pairs(tree: Tree, path: str) -> dict[str, int]:
    pairs = {}
    for line in (tree.read(path) or "").splitlines():
        name, _, value = line.partition(" ")
        if (number := _parse_number(value.strip())) is not None:
            pairs[name] = number
    return pairs


def _read_number(tree: Tree, path: str) -> int | None:
    return _parse_number(tree.read(path) or "")


def _parse_number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 20 else None
