"""Adapters of a fast network (InfiniBand, RoCE), and the GPUs that share a PCI switch or bridge with each."""

from collections.abc import Iterable, Iterator

from launch.discover.gpus import PCI
from launch.discover.tree import Tree
from launch.model.topology import Adapter, Gpu

CLASS = "sys/class/infiniband"
MAX_ADAPTERS = 64
_ACTIVE = "4:"
"""How the kernel begins the state of a port that has a link."""


def read_adapters(tree: Tree, gpus: Iterable[Gpu]) -> tuple[Adapter, ...]:
    """Read the ports with a link, in the order of their names."""
    paths = {gpu.pci_bus_id: _bridges(tree, f"{PCI}/{gpu.pci_bus_id}") for gpu in gpus}
    return tuple(
        adapter
        for name in tree.names(CLASS)[:MAX_ADAPTERS]
        if name.isprintable() and "," not in name and ":" not in name
        for adapter in _read_ports(tree, name, paths)
    )[:MAX_ADAPTERS]


def _read_ports(tree: Tree, name: str, paths: dict[str, tuple[str, ...]]) -> Iterator[Adapter]:
    device = f"{CLASS}/{name}/device"
    node = tree.read(f"{device}/numa_node") or ""
    own = set(_bridges(tree, device))
    beside = {address: len(own.intersection(path)) for address, path in paths.items()}
    near = tuple((address, shared) for address, shared in beside.items() if shared)
    for port in tree.names(f"{CLASS}/{name}/ports"):
        state = tree.read(f"{CLASS}/{name}/ports/{port}/state") or ""
        if port.isascii() and port.isdigit() and state.startswith(_ACTIVE):
            yield Adapter(f"{name}:{int(port[:4])}", int(node) if node.isdigit() else None, near)


def _bridges(tree: Tree, device: str) -> tuple[str, ...]:
    """List the PCI bridges above a device, without the root of the bus."""
    *above, _ = (tree.real(device) or "").split("/")
    return tuple(part for part in above if part.count(":") == 2)
