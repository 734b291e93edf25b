"""AMD's compute driver (KFD): which GPUs HIP finds, in its order, and the partitions of MI300s.

Each node of the topology with a GPU is one device to ROCm, in the order of the nodes, which need not be that
of the PCI bus; ``HIP_VISIBLE_DEVICES`` counts so. A GPU in mode DPX, QPX or CPX has a node for each part.
Nodes of GPUs that a container does not show cannot be read, and are no devices there either. Properties are
as ``drivers/gpu/drm/amd/amdkfd/kfd_topology.c`` of Linux writes them.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from launch.discover.gpus import GpuFacts
from launch.discover.tree import Tree
from launch.model.topology import MAX_GPUS

NODES = "sys/devices/virtual/kfd/kfd/topology/nodes"
_LOCAL_HEAPS = ("1", "2")
"""Public and private memory of the GPU itself, among the kinds of memory banks."""


@dataclass(frozen=True)
class _Node:
    addresses: tuple[str, str]
    """Where the GPU is on the bus: as the node says, and with function 0."""
    memory_bytes: int | None


def apply_kfd(tree: Tree, gpus: Iterable[GpuFacts]) -> tuple[GpuFacts, ...]:
    """Order AMD's GPUs as HIP counts them, in as many parts as they have; others stay as they are.

    Where the compute driver shows none (it is not loaded, or the tree was saved without it) nothing changes.
    """
    known = tuple(gpus)
    of_amd = {gpu.pci_bus_id: gpu for gpu in known if gpu.vendor == "amd"}
    nodes = list(_read_nodes(tree)) if of_amd else []
    found = [
        (of_amd[address], node.memory_bytes)
        for node in nodes
        if (address := next((address for address in node.addresses if address in of_amd), None))
    ]
    if not found:
        return known
    parts = Counter(gpu.pci_bus_id for gpu, _ in found)
    seen: Counter[str] = Counter()
    devices = []
    for place, (gpu, memory_bytes) in enumerate(found):
        device = replace(gpu, order=place, memory_bytes=memory_bytes or gpu.memory_bytes)
        if parts[gpu.pci_bus_id] > 1:
            # Drivers differ in whether parts have names of their own, so that none goes by it.
            device = replace(device, uuid=None, partition=seen[gpu.pci_bus_id], memory_bytes=memory_bytes)
            seen[gpu.pci_bus_id] += 1
        devices.append(device)
    return (*(gpu for gpu in known if gpu.vendor != "amd"), *devices)


def _read_nodes(tree: Tree) -> Iterator[_Node]:
    names = [name for name in tree.names(NODES) if name.isascii() and name.isdigit() and len(name) < 6]
    for name in sorted(names, key=int)[: 2 * MAX_GPUS]:
        about = _properties(tree, f"{NODES}/{name}/properties")
        if not about.get("simd_count"):  # A node of CPUs, or one that may not be read.
            continue
        # Bits 28 to 31 are the partition's number; drivers before 6.10 put it where the function is.
        location = about.get("location_id", 0)
        at = f"{about.get('domain', 0):04x}:{location >> 8 & 0xFF:02x}:{location >> 3 & 0x1F:02x}"
        yield _Node((f"{at}.{location & 7}", f"{at}.0"), _read_memory(tree, f"{NODES}/{name}/mem_banks"))


def _read_memory(tree: Tree, folder: str) -> int | None:
    banks = (_properties(tree, f"{folder}/{name}/properties") for name in tree.names(folder)[:16])
    sizes = [bank.get("size_in_bytes", 0) for bank in banks if str(bank.get("heap_type")) in _LOCAL_HEAPS]
    return sum(sizes) or None


def _properties(tree: Tree, path: str) -> dict[str, int]:
    """Read a file of names and numbers, a pair a line."""
    pairs = (line.split() for line in (tree.read(path) or "").splitlines())
    return {
        pair[0]: int(pair[1])
        for pair in pairs
        if len(pair) == 2 and pair[1].isascii() and pair[1].isdigit() and len(pair[1]) < 21
    }
