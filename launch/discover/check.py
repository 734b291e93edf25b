"""What must hold of any machine, wherever it came from."""

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

from launch.discover.adapters import MAX_ADAPTERS
from launch.discover.gpus import gpu_name, limit_gpus, parse_pci_address, pci_order
from launch.discover.sysfs import limit_numa_nodes
from launch.model.errors import TopologyError
from launch.model.idset import MAX_ID, format_ids
from launch.model.topology import Gpu, Machine

_ADAPTER = re.compile(r"[\w.-]{1,64}:[0-9]{1,4}", re.ASCII)


def check(machine: Machine) -> None:
    """Check what must hold of a machine from any source, so that planners need not ask again.

    Raises:
        TopologyError: With the first thing that does not.
    """
    limit_numa_nodes(len(machine.numa_nodes))
    limit_gpus(len(machine.gpus))
    for complaint in _complaints(machine):
        raise TopologyError(f"the topology contradicts itself: {complaint}")


def _complaints(machine: Machine) -> Iterable[str]:
    nodes = {node.id for node in machine.numa_nodes}
    packages = {package.id for package in machine.packages}
    online = [cpu for core in machine.cores for cpu in core.cpus]
    yield from _repeated("package", (package.id for package in machine.packages))
    yield from _repeated("NUMA node", (node.id for node in machine.numa_nodes))
    yield from _repeated("CPU", online, "cores")
    yield from _repeated("CPU", (cpu for node in machine.numa_nodes for cpu in node.cpus), "NUMA nodes")
    yield from _repeated("GPU", (gpu_name(gpu) for gpu in machine.gpus))
    if len(machine.adapters) > MAX_ADAPTERS:
        yield f"{len(machine.adapters)} network adapters are more than {MAX_ADAPTERS}"
    if not all(_ADAPTER.fullmatch(adapter.name) for adapter in machine.adapters):
        yield "a network adapter's name is none; needed one such as 'mlx5_0:1'"
    if not online:
        yield "no core has an online CPU"
    if any(not core.cpus for core in machine.cores):
        yield "a core has no CPU"
    if max(nodes, default=0) > MAX_ID:
        yield f"NUMA node {max(nodes)} is no possible id"
    yield from _unknown("CPU", machine, set(online))
    for what, named in (
        ("packages", (node for package in machine.packages for node in package.numa_nodes)),
        ("cores", (core.numa_node for core in machine.cores)),
        ("gpus", (gpu.numa_node for gpu in machine.gpus)),
        ("adapters", (adapter.numa_node for adapter in machine.adapters)),
        ("distances", (other for node in machine.numa_nodes for other, _ in node.distances)),
        ("allowed", machine.allowed.mems),
    ):
        yield from (
            f"{what} name NUMA node {node}, which is not listed" for node in set(named) - nodes - {None}
        )
    placed = {node.package for node in machine.numa_nodes} | {core.package for core in machine.cores}
    for package in placed - packages - {None}:
        yield f"package {package} is named and not listed"
    yield from _gpu_complaints(machine.gpus)


def _repeated(what: str, ids: Iterable[Any], where: str = "") -> Iterable[str]:
    for one, times in Counter(ids).items():
        if times > 1:
            yield f"{what} {one} is listed {times} times" + (f" in {where}" if where else "")


def _unknown(what: str, machine: Machine, online: set[int]) -> Iterable[str]:
    sets = {
        "packages": (package.cpus for package in machine.packages),
        "numa_nodes": (node.cpus for node in machine.numa_nodes),
        "gpus": (gpu.cpus for gpu in machine.gpus),
        "allowed": (machine.allowed.cpus,),
    }
    for where, named in sets.items():
        stray = frozenset().union(*named) - online
        if stray:
            yield f"{where} name {what} {format_ids(stray)}, which no core has"


def _gpu_complaints(gpus: tuple[Gpu, ...]) -> Iterable[str]:
    if [gpu.index for gpu in gpus] != list(range(len(gpus))):
        yield "the indexes of gpus do not count from 0"
    for gpu in gpus:
        if parse_pci_address(gpu.pci_bus_id) != gpu.pci_bus_id:
            yield f"GPU {gpu.index} has the PCI address {gpu.pci_bus_id!r}; needed one such as '0004:05:00.0'"
            return
    addresses = [pci_order(gpu.pci_bus_id) for gpu in gpus]
    # HIP has an order of its own, that of the driver's nodes.
    if addresses != sorted(addresses) and not all(gpu.vendor == "amd" for gpu in gpus):
        yield "gpus are not in PCI order"
