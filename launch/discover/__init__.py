"""The only readers of a machine: everything behind them works on frozen values."""

import os
import stat
from typing import Any

from launch.discover.adapters import read_adapters
from launch.discover.check import check
from launch.discover.gpus import (
    GpuFacts,
    leave_out_denied,
    merge_gpus,
    place_gpus,
    read_driver_gpus,
    read_gpu_memory_nodes,
    read_pci_gpus,
)
from launch.discover.kfd import apply_kfd
from launch.discover.limits import probe_set_mempolicy, read_cpuset, read_limits
from launch.discover.sysfs import CPU, read_allowed, read_hardware, read_online
from launch.discover.tree import DirTree, Tree
from launch.model.errors import TopologyError
from launch.model.topology import Machine

MAX_SOURCE_BYTES = 8 << 20
"""The largest file that is read as a saved topology; our own of 60,000 CPUs has 4 MiB."""
_NEEDED = (
    "needed a directory with proc/ and sys/, an archive of hwloc-gather-topology, XML of lstopo, or JSON of "
    "'lmsrun topo --save FILE'"
)
_DRIVER_SIGNS = ("proc/driver/nvidia/version", "dev/nvidiactl", "dev/dxg")
"""What the NVIDIA driver (the last one: WSL's) leaves on a machine; without any NVML has nothing to say."""
_NO_NVML = "nvidia-ml-py is not installed: GPUs are taken from /proc and /sys (pip install nvidia-ml-py)"


def read_machine(source: str | None = None, *, root: str = "/", nvml: Any = None) -> Machine:
    """Read a machine.

    Args:
        source: None or empty for the live machine, else a directory with ``proc/`` and ``sys/``, an archive
            of hwloc-gather-topology, lstopo's XML, or our own JSON. The content decides, not the name.
        root: Where the live machine's ``proc/`` and ``sys/`` are.
        nvml: The module ``pynvml`` or its stand-in; None imports it where a driver is loaded. Only the live
            machine asks it.

    Returns:
        A machine that keeps the promises of ``launch.discover.check.check``.

    Raises:
        TopologyError: If the source cannot be read or contradicts itself.
    """
    if not source:
        return _read_live(root, nvml)
    if os.path.isdir(source):
        return read_tree(DirTree(source), source)
    return _read_file(source)


def _read_live(root: str, nvml: Any) -> Machine:
    tree = DirTree(root)
    missing: tuple[str, ...] = ()
    if nvml is None and has_driver(tree):
        from launch.discover.nvml import import_nvml  # only machines with a driver pay for it

        nvml = import_nvml()
        if nvml is None:
            missing = (_NO_NVML,)
    facts, warnings = find_gpus(tree, nvml)
    return _build(tree, "live", os.uname().machine, facts, (*missing, *warnings), live=True)


def find_gpus(tree: Tree, nvml: Any) -> tuple[tuple[GpuFacts, ...], tuple[str, ...]]:
    """Find the GPUs of this machine, by the first that knows any: NVML, the driver's folder, the PCI bus.

    Args:
        tree: Where ``proc/`` and ``sys/`` are.
        nvml: The module ``pynvml`` or its stand-in; None: it is not there to be asked.

    Returns:
        What is known of each, and NVML's warnings.

    Raises:
        TopologyError: If NVML is to be asked on a machine that shows no CPU.
    """
    of_nvml: tuple[GpuFacts, ...] = ()
    warnings: tuple[str, ...] = ()
    if nvml is not None:
        from launch.discover.nvml import read_nvml

        of_nvml, warnings = read_nvml(nvml, max(read_online(tree)) + 1)
    of_driver = read_driver_gpus(tree)
    of_pci = () if of_nvml or of_driver else apply_kfd(tree, read_pci_gpus(tree))
    allowed = of_driver if of_nvml else leave_out_denied(of_driver, tree.may_use)
    return merge_gpus(of_nvml, allowed, of_pci), warnings


def has_driver(tree: Tree) -> bool:
    """Whether NVIDIA's driver is loaded, so that NVML has something to say."""
    return any(tree.real(sign) is not None for sign in _DRIVER_SIGNS)


def read_tree(tree: Tree, source: str) -> Machine:
    """Read a saved tree, which shows one process's limits but not whether it may set a memory policy.

    Raises:
        TopologyError: If the tree shows no CPU or contradicts itself.
    """
    if not tree.names(CPU):
        raise TopologyError(
            f"{source} holds no {CPU}; needed a directory with the proc/ and sys/ of a machine, "
            "such as an unpacked archive of hwloc-gather-topology"
        )
    try:
        facts = merge_gpus((), read_driver_gpus(tree), apply_kfd(tree, read_pci_gpus(tree)))
        return _build(tree, source, _read_architecture(tree), facts, (), live=False)
    except (TopologyError, ValueError) as error:  # such as a number of ten thousand digits
        raise TopologyError(f"{source}: {error}") from error


def _build(
    tree: Tree,
    source: str,
    architecture: str,
    facts: tuple[GpuFacts, ...],
    warnings: tuple[str, ...],
    *,
    live: bool,
) -> Machine:
    hardware = read_hardware(
        tree, read_gpu_memory_nodes(tree, (*facts, *read_driver_gpus(tree)), architecture)
    )
    gpus, gpu_warnings = place_gpus(tree, facts, hardware)
    machine = Machine(
        source=source,
        architecture=architecture,
        packages=hardware.packages,
        numa_nodes=hardware.numa_nodes,
        cores=hardware.cores,
        gpus=gpus,
        allowed=read_allowed(tree, hardware, {} if live else read_cpuset(tree)),
        limits=read_limits(tree, set_mempolicy=probe_set_mempolicy(architecture) if live else None),
        warnings=(*warnings, *hardware.warnings, *gpu_warnings),
        adapters=read_adapters(tree, gpus),
    )
    check(machine)
    return machine


def _read_architecture(tree: Tree) -> str:
    """Read what hwloc-gather-topology noted, else what the kernel's version or its CPU list gives away."""
    for line in (tree.read("proc/hwloc-nofile-info") or "").splitlines():
        key, _, value = line.partition(":")
        if key == "Architecture" and value.strip():
            return value.strip()
    told = f"{tree.read('proc/version') or ''} {tree.read('proc/cpuinfo') or ''}"
    for architecture, signs in _ARCHITECTURE_SIGNS.items():
        if any(sign in told for sign in signs):
            return architecture
    return "unknown"


_ARCHITECTURE_SIGNS = {
    "ppc64le": ("ppc64le", "POWER8", "POWER9", "POWER10"),
    "aarch64": ("aarch64", "CPU implementer"),
    "x86_64": ("x86_64", "GenuineIntel", "AuthenticAMD"),
}


def _read_file(source: str) -> Machine:
    content = _read_content(source)
    from launch.discover.archive import is_archive, read_archive

    if is_archive(content[:512]):
        return read_tree(read_archive(content, source), source)
    start = content.lstrip(b"\xef\xbb\xbf \t\r\n")[:1]
    if start == b"<":
        from launch.discover.hwloc_xml import parse_hwloc_xml

        return parse_hwloc_xml(content, source)
    if start == b"{":
        from launch.discover.saved import parse_saved

        return parse_saved(content, source)
    raise TopologyError(f"{source} is no topology; {_NEEDED}")


def _read_content(source: str) -> bytes:
    try:
        # O_NONBLOCK: a FIFO must not hang the launcher before it is refused.
        descriptor = os.open(source, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise TopologyError(f"cannot read topology {source}: {reason}; {_NEEDED}") from error
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise TopologyError(f"{source} is not a regular file; needed a saved topology or a directory")
        if status.st_size > MAX_SOURCE_BYTES:
            raise TopologyError(f"{source} has {status.st_size} bytes; needed {MAX_SOURCE_BYTES} at most")
        try:
            return file.read(MAX_SOURCE_BYTES)
        except OSError as error:
            raise TopologyError(f"cannot read topology {source}: {error.strerror}") from error
