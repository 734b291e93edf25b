"""The CPU mask and the memory policy of this process: read back from the kernel, and set.

Reading uses the system calls themselves: they are what counts, they need no library, and no wrapper can hide
a refusal. Setting goes through py-libnuma where it can (see ``apply_mem_policy``), always checked by reading
back.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable

from launch.model.errors import LmsrunError
from launch.model.idset import IdSet, format_ids, parse_ids

TYPE_CHECKING = False  # Each rank would pay for typing.
if TYPE_CHECKING:
    from launch.model.plan import MemPolicy

_GET_MEMPOLICY = {"x86_64": 239, "aarch64": 236, "riscv64": 236, "ppc64le": 260, "ppc64": 260, "s390x": 269}
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237, "riscv64": 237, "ppc64le": 261, "ppc64": 261, "s390x": 270}
"""System call numbers: arch/*/entry/syscalls and include/uapi/asm-generic/unistd.h of the Linux kernel."""

_MODES = {
    0: "none",
    1: "preferred",
    2: "bind",
    3: "interleave",
    4: "local",
    5: "preferred-many",
    6: "weighted-interleave",
}
_MODE_NUMBERS = {"none": 0, "preferred": 1, "bind": 2, "preferred-many": 5}
_MODE_BITS = 0x1FFF
"""include/uapi/linux/mempolicy.h; bits above hold flags (static nodes, relative nodes, NUMA balancing)."""

_WORD_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)
_LEAST_MASK_BITS = 1024
"""The kernel refuses a mask shorter than its own node count (at most 1024 in every distribution's build)."""


class BindingError(LmsrunError):
    """The kernel or a library refused a CPU mask or a memory policy."""

    exit_code = 1


class FoundBinding:
    """What the kernel says of a process. ``mem_policy`` is None when it cannot be read on this system."""

    def __init__(self, cpus: IdSet, mem_policy: str | None, mem_nodes: IdSet) -> None:
        self.cpus, self.mem_policy, self.mem_nodes = cpus, mem_policy, mem_nodes


def read_binding(sysfs: str = "/sys") -> FoundBinding:
    """Read the CPU mask and the memory policy of the calling thread back from the kernel."""
    policy, nodes = _read_mem_policy(sysfs)
    return FoundBinding(frozenset(os.sched_getaffinity(0)), policy, nodes)


def apply_cpus(cpus: IdSet) -> None:
    """Bind the calling process to ``cpus``; none leaves it as it is.

    Raises:
        BindingError: If the kernel refuses or silently keeps fewer CPUs.
    """
    if not cpus:
        return
    try:
        os.sched_setaffinity(0, cpus)
    except (OSError, OverflowError) as error:
        raise BindingError(f"cannot bind to CPUs {format_ids(cpus)}: {error}") from error
    kept = frozenset(os.sched_getaffinity(0))
    if kept != cpus:
        raise BindingError(f"asked for CPUs {format_ids(cpus)}, the kernel gave {format_ids(kept)}")


def apply_mem_policy(policy: MemPolicy, nodes: IdSet, sysfs: str = "/sys") -> str:
    """Set the memory policy of the calling process; ``none`` leaves it as it is.

    ``bind`` goes through py-libnuma when it can be loaded. libnuma ends the process on ids that do not exist
    and reports no refusal, so ids are checked first and the policy is read back after. Other policies, which
    py-libnuma does not offer, and a machine without libnuma use the system call.

    Returns:
        What set it: ``libnuma``, ``set_mempolicy`` or ``nothing``.

    Raises:
        BindingError: If a node does not exist, or the kernel refuses.
    """
    if policy == "none":
        return "nothing"
    missing = nodes - _online_nodes(sysfs)
    if missing or not nodes:
        raise BindingError(
            f"memory nodes {format_ids(nodes) or 'none'} were planned, this machine has "
            f"{format_ids(_online_nodes(sysfs))}; plan on this machine"
        )
    setter = _libnuma_membind() if policy == "bind" else None
    if setter is not None:
        setter(*sorted(nodes))
    else:
        _set_mempolicy(policy, nodes)
    found, found_nodes = _read_mem_policy(sysfs)
    if (found, found_nodes) != (policy, nodes):
        raise BindingError(
            f"asked for memory policy {describe_policy(policy, nodes)}, the kernel keeps "
            f"{describe_policy(found, found_nodes)}; "
            "try --mem-policy none, or in a container --cap-add SYS_NICE"
        )
    return "libnuma" if setter is not None else "set_mempolicy"


def describe_policy(policy: str | None, nodes: Iterable[int]) -> str:
    """Such as ``bind 0,8``, ``none`` or ``unknown``."""
    return " ".join(filter(None, [policy or "unknown", format_ids(nodes)]))


def _libnuma_membind() -> Callable[..., None] | None:
    """py-libnuma's setter, or None without libnuma: importing it then raises AttributeError, not ImportError.

    The other PyPI package with the import name ``numa`` has no ``memory.set_membind_nodes`` and counts as
    absent.
    """
    try:
        from numa import memory

        setter: Callable[..., None] = memory.set_membind_nodes
    except (ImportError, AttributeError, OSError):
        return None
    return setter


def _read_mem_policy(sysfs: str) -> tuple[str | None, IdSet]:
    number = _GET_MEMPOLICY.get(os.uname().machine)
    if number is None:
        return None, frozenset()
    words = _mask_words(sysfs)
    mode, mask = ctypes.c_int(-1), (ctypes.c_ulong * words)()
    length = ctypes.c_ulong(words * _WORD_BITS)
    nothing = ctypes.c_void_p(None)
    if _syscall(number, ctypes.byref(mode), mask, length, nothing, ctypes.c_ulong(0)) != 0:
        return None, frozenset()
    kind = _MODES.get(mode.value & _MODE_BITS, f"mode {mode.value & _MODE_BITS}")
    nodes = {
        word * _WORD_BITS + bit for word in range(words) for bit in range(_WORD_BITS) if mask[word] >> bit & 1
    }
    return kind, frozenset(nodes)


def _set_mempolicy(policy: MemPolicy, nodes: IdSet) -> None:
    number = _SET_MEMPOLICY.get(os.uname().machine)
    if number is None:
        raise BindingError(f"cannot set a memory policy on {os.uname().machine}; try --bind-method numactl")
    words = max(_LEAST_MASK_BITS, max(nodes) + 1) // _WORD_BITS + 1
    mask = (ctypes.c_ulong * words)()
    for node in nodes:
        mask[node // _WORD_BITS] |= 1 << node % _WORD_BITS
    # The kernel reads one bit fewer than it is told (mm/mempolicy.c, get_nodes), hence the + 1.
    length = ctypes.c_ulong(words * _WORD_BITS + 1)
    if _syscall(number, ctypes.c_int(_MODE_NUMBERS[policy]), mask, length) != 0:
        reason = os.strerror(ctypes.get_errno())
        raise BindingError(
            f"the kernel refuses memory policy {describe_policy(policy, nodes)}: {reason}; "
            "try --mem-policy none, or in a container --cap-add SYS_NICE"
        )


def _syscall(number: int, *arguments: object) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    return int(libc.syscall(ctypes.c_long(number), *arguments))


def _mask_words(sysfs: str) -> int:
    """Words of a node mask, sized by the highest possible id, never by a count: ids are sparse."""
    possible = _read_ids(f"{sysfs}/devices/system/node/possible")
    return max(_LEAST_MASK_BITS, max(possible, default=0) + 1) // _WORD_BITS + 1


def _online_nodes(sysfs: str) -> IdSet:
    return _read_ids(f"{sysfs}/devices/system/node/online") or frozenset({0})


def _read_ids(path: str) -> IdSet:
    try:
        with open(path, encoding="ascii") as file:
            return parse_ids(file.read())
    except (OSError, ValueError):
        return frozenset()
