"""Limits beyond the hardware: cgroups (v1 and v2), locked memory, permission to set memory policies."""

import errno
import posixpath
import re
from collections.abc import Iterator
from dataclasses import dataclass

from launch.discover.tree import Tree
from launch.model.idset import IdSet
from launch.model.topology import Limits

NO_LIMIT_BYTES = 1 << 62
"""cgroup v1 writes "no limit" as the largest multiple of the page size below 2^63."""
SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237, "riscv64": 237, "ppc64le": 261, "ppc64": 261, "s390x": 270}
"""The system call's number, from the kernel's ``syscall.tbl`` of each architecture."""
NO_SUCH_MODE = 0x3FFF


@dataclass(frozen=True)
class _Mount:
    """A mounted cgroup hierarchy. ``root``, the cgroup seen at ``path``, is not always ``/``."""

    controllers: frozenset[str]
    root: str
    path: str


def read_limits(tree: Tree, *, set_mempolicy: bool | None) -> Limits:
    """Read the limits of the process that ``proc/self`` shows.

    Args:
        tree: Where ``proc/`` and ``sys/`` are.
        set_mempolicy: What ``probe_set_mempolicy`` said, or None for a machine that is not this one.
    """
    return Limits(
        memory_bytes=_read_memory_limit(tree),
        memlock_bytes=_read_memlock(tree),
        cpu_millis=_read_cpu_quota(tree),
        set_mempolicy=set_mempolicy,
    )


def probe_set_mempolicy(architecture: str) -> bool | None:
    """Ask the kernel whether this process may set a memory policy, without setting one.

    A mode that does not exist is refused with EINVAL by the kernel, but with EPERM by a seccomp filter such
    as Docker's, which stands before it; ENOSYS means a kernel without NUMA support.

    Returns:
        None when the architecture's system call is not known here.
    """
    number = SET_MEMPOLICY.get(architecture)
    if number is None:
        return None
    import ctypes  # 5 ms that a replayed topology need not pay

    libc = ctypes.CDLL(None, use_errno=True)
    result = libc.syscall(
        ctypes.c_long(number), ctypes.c_long(NO_SUCH_MODE), ctypes.c_void_p(None), ctypes.c_ulong(0)
    )
    return bool(result == -1 and ctypes.get_errno() == errno.EINVAL)


def _read_memlock(tree: Tree) -> int | None:
    found = re.search(r"^Max locked memory\s+(\S+)", tree.read("proc/self/limits") or "", re.MULTILINE)
    return int(found[1]) if found and found[1].isdecimal() else None


def _read_memory_limit(tree: Tree) -> int | None:
    """Read the tightest limit of the process's cgroup and of all above it: the kernel enforces every one."""
    limits = [
        int(text)
        for name in ("memory.max", "memory.limit_in_bytes")
        for folder in read_cgroup_folders(tree, "memory")
        if (text := tree.read(f"{folder}/{name}") or "").isdecimal()
    ]
    return min((limit for limit in limits if limit < NO_LIMIT_BYTES), default=None)


def _read_cpu_quota(tree: Tree) -> int | None:
    """Read the tightest limit of CPU time, as ``docker --cpus`` and Kubernetes set one, in thousandths.

    v2 has quota and period in one file, v1 in two; a quota that is no number, or negative, is none.
    """
    found = []
    for folder in read_cgroup_folders(tree, "cpu"):
        both = (tree.read(f"{folder}/cpu.max") or "").split()
        if len(both) != 2:
            both = [(tree.read(f"{folder}/cpu.cfs_{name}_us") or "").strip() for name in ("quota", "period")]
        quota, period = (int(text) if text.isdecimal() and len(text) < 19 else 0 for text in both)
        if quota and period:
            found.append(1000 * quota // period)
    return min(found, default=None)


def read_cpuset(tree: Tree) -> dict[str, IdSet | None]:
    """Read the cpuset's ``cpus`` and ``mems``; None where nothing is said.

    Only for saved trees, which hold the cgroup of the process that gathered them but not its affinity.
    """
    return {"cpus": _read_cpuset_ids(tree, "cpus"), "mems": _read_cpuset_ids(tree, "mems")}


def _read_cpuset_ids(tree: Tree, what: str) -> IdSet | None:
    for folder in read_cgroup_folders(tree, "cpuset"):
        # v1's effective_* files are not what its kernel enforces; v2 has ".effective" behind the name.
        for name in (f"cpuset.{what}.effective", f"cpuset.{what}"):
            try:
                if text := tree.read(f"{folder}/{name}"):
                    return tree.parser.ids(text)
            except ValueError:
                continue
    return None


def read_cgroup_folders(tree: Tree, controller: str) -> Iterator[str]:
    """Find the folders of the process's cgroup for a controller, from its own up to the top of the mount."""
    mounts = _read_mounts(tree)
    for line in (tree.read("proc/self/cgroup") or "").splitlines():
        _, _, rest = line.partition(":")
        names, _, cgroup = rest.partition(":")
        listed = frozenset(filter(None, names.split(",")))
        if listed and controller not in listed:
            continue
        for mount in mounts:
            if (controller in mount.controllers) if listed else (not mount.controllers):
                yield from _folders_up(mount, cgroup)


def _read_mounts(tree: Tree) -> list[_Mount]:
    mounts = []
    for line in (tree.read("proc/self/mountinfo") or "").splitlines():
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if len(fields) >= 5 and len(kind) >= 3 and kind[0] in ("cgroup", "cgroup2"):
            controllers = frozenset(kind[2].split(",")) if kind[0] == "cgroup" else frozenset()
            mounts.append(_Mount(controllers, fields[3], fields[4].lstrip("/")))
    return mounts or _usual_mounts(tree)


def _usual_mounts(tree: Tree) -> list[_Mount]:
    """Where everybody mounts them, for trees without ``mountinfo``."""
    base = "sys/fs/cgroup"
    v1 = [
        _Mount(frozenset(name.split(",")), "/", f"{base}/{name}")
        for name in tree.names(base)
        if {"memory", "cpuset", "cpu"} & set(name.split(","))
    ]
    return [*v1, _Mount(frozenset(), "/", base)]


def _folders_up(mount: _Mount, cgroup: str) -> Iterator[str]:
    below = posixpath.relpath(posixpath.normpath(cgroup), posixpath.normpath(mount.root))
    if below == ".." or below.startswith("../"):
        # The process's cgroup lies outside what is mounted here: only the mount's own top is to be seen.
        below = "."
    # A hierarchy that claims to be mounted at / itself must not lead out of the tree, nor up for ever.
    folder = posixpath.normpath(f"{mount.path}/{below}").lstrip("/")
    while len(folder) > len(mount.path):
        yield folder
        folder = posixpath.dirname(folder)
    yield mount.path
