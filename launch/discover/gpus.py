"""GPUs and their place: NVML, else the driver's folder in ``proc/``, else display devices on the PCI bus."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Literal

from launch.discover.sysfs import NODE, Hardware, read_ids, read_ids_or_mask
from launch.discover.tree import Tree
from launch.model.errors import TopologyError, TopologyLimitError
from launch.model.idset import IdSet
from launch.model.topology import MAX_GPUS, Gpu, NumaNode

PCI = "sys/bus/pci/devices"
DRIVER = "proc/driver/nvidia/gpus"

Vendor = Literal["nvidia", "amd"]
NVIDIA, AMD = "0x10de", "0x1002"
MIG = "MIG-"
"""Begins the UUID of a part of a GPU that is a device of its own (Multi-Instance GPU)."""
PCI_GPU_CLASSES: Mapping[str, tuple[Vendor, tuple[str, ...]]] = {
    NVIDIA: ("nvidia", ("0x0300", "0x0302")),
    AMD: ("amd", ("0x0300", "0x0302", "0x0380", "0x1200")),
}
"""PCI base and sub class (VGA, 3D, other display, processing accelerator) of a GPU, by vendor id. AMD's
Instinct cards are 0x0380 and 0x1200. A board's own VGA (ASPEED, Matrox) has another vendor."""
_BOARD_VGA = frozenset({"0x515e", "0x5969", "0x4752"})
"""ATI ES1000 and Rage XL: the VGA of old server boards, by the same vendor id as AMD's GPUs."""
_PCI_ADDRESS = re.compile(r"([0-9a-f]{4,8}):([0-9a-f]{2}):([0-9a-f]{2})\.([0-7])")


@dataclass(frozen=True)
class GpuFacts:
    """What is known of a GPU before it has a place."""

    pci_bus_id: str
    vendor: Vendor | None
    name: str | None = None
    uuid: str | None = None
    memory_bytes: int | None = None
    near_cpus: IdSet = frozenset()
    """NVML's CPU affinity."""
    memory_node: int | None = None
    """The NUMA node that the kernel made of the GPU's own memory."""
    order: int | None = None
    """Its place among AMD's GPUs as HIP counts them."""
    partition: int | None = None
    """Which part of the GPU at this address it is."""
    device: str | None = None
    """Its device file, as ``dev/nvidia0``, where the driver tells its number."""


def parse_pci_address(text: str) -> str | None:
    """Normalise a PCI address to ``dddd:bb:dd.f``, lower case; None for anything else.

    nvidia-smi and NVML print domains of eight digits, sysfs of four (more only above 0xffff).
    """
    found = _PCI_ADDRESS.fullmatch(text.strip().lower())
    return f"{int(found[1], 16):04x}:{found[2]}:{found[3]}.{found[4]}" if found else None


def gpu_name(gpu: "GpuFacts | Gpu") -> str:
    """Name a GPU by its address, and a part of a GPU by what tells it from the others there."""
    uuid = gpu.uuid or ""
    if gpu.partition is not None:
        return f"{gpu.pci_bus_id} partition {gpu.partition}"
    return f"{gpu.pci_bus_id} {uuid}" if uuid.startswith(MIG) else gpu.pci_bus_id


def pci_order(pci_bus_id: str) -> tuple[int, ...]:
    """Make a sort key: the order in which CUDA numbers GPUs under CUDA_DEVICE_ORDER=PCI_BUS_ID."""
    return tuple(int(part, 16) for part in re.split("[:.]", pci_bus_id))


def read_driver_gpus(tree: Tree) -> tuple[GpuFacts, ...]:
    """Read the GPUs that NVIDIA's driver has a folder for."""
    return _limited(
        _read_driver_gpu(tree, f"{DRIVER}/{name}", address)
        for name in tree.names(DRIVER)
        if (address := parse_pci_address(name))
    )


def _read_driver_gpu(tree: Tree, folder: str, address: str) -> GpuFacts:
    about = _fields(tree.read(f"{folder}/information"))
    # Written by the driver where the GPU's memory is system memory: NVLink on POWER9, Grace Hopper.
    numa = _fields(tree.read(f"{folder}/numa_status"))
    node, size = numa.get("Node", ""), numa.get("Size", "")
    minor = about.get("Device Minor", "")
    return GpuFacts(
        address,
        "nvidia",
        name=about.get("Model") or None,
        uuid=uuid if (uuid := about.get("GPU UUID", "")).startswith("GPU-") and "?" not in uuid else None,
        memory_bytes=int(size, 16) or None if re.fullmatch("(0x)?[0-9a-f]{1,15}", size) else None,
        memory_node=int(node) if re.fullmatch("[0-9]{1,5}", node) else None,
        device=f"dev/nvidia{minor}" if re.fullmatch("[0-9]{1,3}", minor) else None,
    )


def leave_out_denied(
    gpus: tuple[GpuFacts, ...], may_use: Callable[[str], bool | None]
) -> tuple[GpuFacts, ...]:
    """Leave out the GPUs whose device files a batch system or a container keeps from this process.

    The driver's folder tells of them all the same; NVML and CUDA count the others alone. Where there is no
    file at all, all stay: the driver makes the files when they are first needed.

    Args:
        gpus: From the driver's folder.
        may_use: Whether this process may read and write a device file; ``None`` where there is none.
    """
    may = {gpu.device: may_use(gpu.device) for gpu in gpus if gpu.device}
    if all(answer is None for answer in may.values()):
        return gpus
    return tuple(gpu for gpu in gpus if gpu.device is None or may[gpu.device])


def _fields(text: str | None) -> dict[str, str]:
    lines = (line.partition(":") for line in (text or "").splitlines())
    return {key.strip(): value.strip() for key, _, value in lines}


def read_pci_gpus(tree: Tree) -> tuple[GpuFacts, ...]:
    """Display devices of NVIDIA or AMD on the PCI bus, whether a driver is loaded or not."""
    return _limited(
        gpu
        for name in tree.names(PCI)
        if (address := parse_pci_address(name)) and (gpu := _read_pci_gpu(tree, f"{PCI}/{name}", address))
    )


def _read_pci_gpu(tree: Tree, folder: str, address: str) -> GpuFacts | None:
    vendor, classes = PCI_GPU_CLASSES.get(tree.read(f"{folder}/vendor") or "", (None, ()))
    if not (tree.read(f"{folder}/class") or "").startswith(classes or "none"):
        return None
    # A virtual function is a share of a GPU that is in the list itself.
    if tree.read(f"{folder}/device") in _BOARD_VGA or tree.real(f"{folder}/physfn") is not None:
        return None
    unique, vram = tree.read(f"{folder}/unique_id"), tree.read(f"{folder}/mem_info_vram_total") or ""
    return GpuFacts(
        address,
        vendor,
        name=tree.read(f"{folder}/product_name") or None,
        uuid=f"GPU-{unique}" if unique else None,
        memory_bytes=int(vram) if vram.isascii() and vram.isdigit() else None,
    )


def merge_gpus(
    nvml: Iterable[GpuFacts], driver: Iterable[GpuFacts], pci: Iterable[GpuFacts]
) -> tuple[GpuFacts, ...]:
    """Take the GPUs of the first source that has any; fill NVML's up with what the driver's folder knows."""
    of_driver = {gpu.pci_bus_id: gpu for gpu in driver}
    of_nvml = [_fill(gpu, of_driver.get(gpu.pci_bus_id)) for gpu in nvml]
    return tuple(of_nvml or of_driver.values() or pci)


def _fill(gpu: GpuFacts, other: GpuFacts | None) -> GpuFacts:
    if other is None:
        return gpu
    return replace(
        gpu,
        name=gpu.name or other.name,
        uuid=gpu.uuid or other.uuid,
        memory_bytes=gpu.memory_bytes or other.memory_bytes,
        memory_node=other.memory_node,
    )


def read_gpu_memory_nodes(tree: Tree, gpus: Iterable[GpuFacts], architecture: str) -> frozenset[int]:
    """NUMA nodes that are a GPU's own memory.

    The driver's ``numa_status`` names them. On a machine with NVIDIA GPUs there are also the nodes that
    the kernel lists as generic initiators (Grace Hopper's firmware declares each GPU and each possible
    MIG instance as one in the ACPI SRAT), and on ppc64le, where ``numa_status`` is missing, all nodes
    without CPUs (only the NVLink GPUs of POWER9 bring such nodes there, numbered down from 255). A node
    with CPUs stays host memory in any case.
    """
    found = list(gpus)
    named = frozenset(gpu.memory_node for gpu in found if gpu.memory_node is not None)
    if not any(gpu.vendor == "nvidia" for gpu in found):
        return named
    if not named and is_nvlink_machine(found, architecture):
        online = read_ids(tree, f"{NODE}/online") or frozenset()
        return online - (read_ids(tree, f"{NODE}/has_cpu") or online)
    return named | (read_ids(tree, f"{NODE}/has_generic_initiator") or frozenset())


def is_nvlink_machine(gpus: Iterable[GpuFacts], architecture: str) -> bool:
    """Whether every NUMA node without CPUs is a GPU's memory: a POWER machine with NVIDIA's GPUs."""
    return architecture in ("ppc64le", "ppc64") and any(gpu.vendor == "nvidia" for gpu in gpus)


def place_gpus(
    tree: Tree, gpus: Iterable[GpuFacts], hardware: Hardware
) -> tuple[tuple[Gpu, ...], tuple[str, ...]]:
    """Give every GPU its NUMA node, in PCI order, or where that is known in HIP's.

    Returns:
        The GPUs, and a warning for each whose node stays unknown.
    """
    ordered = sorted({gpu_name(gpu): gpu for gpu in gpus}.values(), key=_count_order)
    placed = tuple(
        build_gpu(index, gpu, tuple(_read_localities(tree, gpu, hardware.online)), hardware)
        for index, gpu in enumerate(ordered)
    )
    return placed, say_unplaced(placed)


def _count_order(gpu: GpuFacts) -> tuple[int, ...]:
    return (1, gpu.order) if gpu.order is not None else (0, *pci_order(gpu.pci_bus_id))


def limit_gpus(count: int) -> None:
    """Refuse more GPUs than a host has: each is compared with each node.

    Raises:
        TopologyError: If there are more.
    """
    if count > MAX_GPUS:
        raise TopologyLimitError(f"more than {MAX_GPUS} GPUs; needed one machine")


def _limited(gpus: Iterable[GpuFacts]) -> tuple[GpuFacts, ...]:
    found = tuple(islice(gpus, MAX_GPUS + 1))
    limit_gpus(len(found))
    return found


def say_unplaced(gpus: Iterable[Gpu]) -> tuple[str, ...]:
    """Write a warning for each GPU whose NUMA node is unknown."""
    return tuple(
        f"GPU {gpu.index} ({gpu.pci_bus_id}): its NUMA node is unknown; its rank is not bound to one"
        for gpu in gpus
        if gpu.numa_node is None
    )


def build_gpu(index: int, gpu: GpuFacts, localities: Iterable[int | IdSet], hardware: Hardware) -> Gpu:
    """Build a GPU with its place.

    Args:
        index: Its position in PCI order.
        gpu: What is known of it.
        localities: What its surroundings say, the most trusted first: a node's id, or the CPUs nearby.
        hardware: The machine.
    """
    numa_node, cpus = locate(localities, hardware)
    return Gpu(
        index=index,
        pci_bus_id=gpu.pci_bus_id,
        name=gpu.name,
        uuid=gpu.uuid,
        numa_node=numa_node,
        cpus=cpus,
        memory_bytes=gpu.memory_bytes,
        vendor=gpu.vendor,
        partition=gpu.partition,
    )


def locate(localities: Iterable[int | IdSet], hardware: Hardware) -> tuple[int | None, IdSet]:
    """Locate the NUMA node with CPUs that a device hangs on, and the CPUs near it.

    The first locality that settles on one node decides; then the only node with CPUs. CPUs on several
    nodes that are not all of the machine (a package of several nodes) are kept, without a node.
    """
    nodes = {node.id: node for node in hardware.numa_nodes}
    near: IdSet = frozenset()
    for locality in localities:
        node = nodes.get(locality) if isinstance(locality, int) else _node_around(locality, hardware)
        if node is not None and not node.cpus:
            node = _nearest_with_cpus(node, hardware)
        if node is not None:
            return node.id, node.cpus
        if isinstance(locality, frozenset) and locality < hardware.online and not near:
            near = locality
    with_cpus = [node for node in hardware.numa_nodes if node.cpus]
    return (with_cpus[0].id, with_cpus[0].cpus) if len(with_cpus) == 1 else (None, near)


def _node_around(cpus: IdSet, hardware: Hardware) -> NumaNode | None:
    """Find the one node that all of the CPUs lie on."""
    around = None
    for cpu in cpus:
        node = hardware.node_of.get(cpu, around)
        if around is not None and node is not around:
            return None
        around = node
    return around


def _nearest_with_cpus(node: NumaNode, hardware: Hardware) -> NumaNode | None:
    """Find the node with CPUs nearest to one without, unless two are equally near."""
    distance = dict(node.distances)
    others = sorted(
        (distance[other.id], other.id) for other in hardware.numa_nodes if other.cpus and other.id in distance
    )
    if not others or (len(others) > 1 and others[0][0] == others[1][0]):
        return None
    return next(other for other in hardware.numa_nodes if other.id == others[0][1])


def _read_localities(tree: Tree, gpu: GpuFacts, online: IdSet) -> Iterator[int | IdSet]:
    """Read what sysfs says of the device, then of the bridges above it, then NVML's affinity."""
    folder = f"{PCI}/{gpu.pci_bus_id}"
    while folder:
        numa_node = tree.read(f"{folder}/numa_node") or ""
        if numa_node.isascii() and numa_node.isdigit():  # -1 is unknown, not 0
            yield int(numa_node)
        try:
            near = read_ids_or_mask(tree, f"{folder}/local_cpulist", f"{folder}/local_cpus")
        except TopologyLimitError:
            raise
        except TopologyError:
            near = None
        if near and near & online:
            yield near & online
        folder = _bridge_above(tree, folder)
    if gpu.near_cpus & online:
        yield gpu.near_cpus & online


def _bridge_above(tree: Tree, folder: str) -> str:
    """Find the PCI device that a device hangs on; nothing at the root bus."""
    parent = (tree.real(folder) or "").rpartition("/")[0]
    return parent if parse_pci_address(parent.rpartition("/")[2]) else ""
