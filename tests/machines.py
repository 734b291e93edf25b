"""Synthetic machines: a short description becomes the ``proc/`` and ``sys/`` that a kernel would show.

``machine("dgx")`` is a ``Machine`` value, ``build_root("dgx", folder)`` a directory for ``--topology``.
To vary one: ``machine(replace(SPECS["dgx"], allowed_cpus="0-15"))``.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from launch.discover import read_tree
from launch.discover.tree import MemoryTree
from launch.model.idset import IdSet, format_ids, parse_ids
from launch.model.topology import Machine

GIB = 1 << 30


@dataclass(frozen=True)
class NodeSpec:
    """A NUMA node: its CPUs (offline ones too), the package they are in, its memory."""

    id: int
    cpus: str
    package: int | None
    memory_bytes: int | None


@dataclass(frozen=True)
class GpuSpec:
    """A PCI display device; every file that is None is absent from sysfs."""

    address: str
    numa_node: int | None = None
    local_cpus: str | None = None
    vendor: str | None = "0x10de"
    device: str = "0x1db1"
    pci_class: str | None = "0x030200"
    bridge_numa_node: int | None = None
    in_driver: bool = False
    memory_node: int | None = None
    memory_bytes: int | None = None
    name: str | None = None
    uuid: str | None = None


@dataclass(frozen=True)
class MachineSpec:
    """A machine in short. ``threads`` PUs a core, numbered side by side unless ``siblings_last``."""

    nodes: tuple[NodeSpec, ...]
    gpus: tuple[GpuSpec, ...] = ()
    threads: int = 1
    siblings_last: bool = False
    offline: str = ""
    architecture: str = "x86_64"
    allowed_cpus: str | None = None
    allowed_mems: str | None = None
    near_distance: int = 12
    far_distance: int = 32
    memory_limits: tuple[str, ...] = ()
    """cgroup v2 ``memory.max``, from the process's own cgroup up."""
    memlock: str = "unlimited"
    generic_initiators: str | None = None
    extra: dict[str, str] = field(default_factory=dict)


def build_files(spec: MachineSpec) -> dict[str, str]:
    """Every file of the tree by relative path."""
    cpus = sorted(frozenset().union(*(parse_ids(node.cpus) for node in spec.nodes)))
    online = frozenset(cpus) - parse_ids(spec.offline)
    files = {
        "sys/devices/system/cpu/online": format_ids(online),
        "sys/devices/system/cpu/possible": format_ids(cpus),
        "sys/devices/system/node/online": format_ids(node.id for node in spec.nodes),
        "sys/devices/system/node/has_cpu": format_ids(node.id for node in spec.nodes if node.cpus),
        "proc/version": f"Linux version 6.1.0 ({spec.architecture})",
        "proc/self/status": _status(spec, online),
        "proc/self/limits": f"{'Max locked memory':<26}{spec.memlock:<21}{spec.memlock:<21}bytes\n",
        **_cgroup_files(spec),
    }
    if spec.generic_initiators is not None:
        files["sys/devices/system/node/has_generic_initiator"] = spec.generic_initiators
    for node in spec.nodes:
        files |= _node_files(spec, node, online)
    for gpu in spec.gpus:
        files |= _gpu_files(spec, gpu)
    return files | spec.extra


def build_links(spec: MachineSpec) -> dict[str, str]:
    """The links of ``sys/bus/pci/devices``, for GPUs below a bridge."""
    return {
        f"sys/bus/pci/devices/{gpu.address}": f"../../../devices/{_bridge(gpu)}/{gpu.address}"
        for gpu in spec.gpus
        if gpu.bridge_numa_node is not None
    }


def build_root(spec: "MachineSpec | str", folder: Path) -> Path:
    """Write the tree below a folder, which ``--topology`` then takes."""
    found = SPECS[spec] if isinstance(spec, str) else spec
    for path, text in build_files(found).items():
        at = folder / path
        at.parent.mkdir(parents=True, exist_ok=True)
        at.write_text(text + "\n")
    for path, target in build_links(found).items():
        at = folder / path
        at.parent.mkdir(parents=True, exist_ok=True)
        at.symlink_to(target)
    return folder


def machine(spec: "MachineSpec | str") -> Machine:
    """The value that discovery makes of the tree; nothing is written."""
    found = SPECS[spec] if isinstance(spec, str) else spec
    files = {path: text.encode() for path, text in build_files(found).items()}
    return read_tree(MemoryTree(files, build_links(found)), spec if isinstance(spec, str) else "synthetic")


def with_gpu_memory(known: Machine, memory_bytes: int) -> Machine:
    """The machine with that much memory on every GPU, as NVML would tell (a tree does not)."""
    return replace(known, gpus=tuple(replace(gpu, memory_bytes=memory_bytes) for gpu in known.gpus))


def core_groups(node: NodeSpec, spec: MachineSpec) -> list[IdSet]:
    """The PUs of each core of a node, offline ones included."""
    cpus = sorted(parse_ids(node.cpus))
    cores = len(cpus) // spec.threads
    if spec.siblings_last:
        return [
            frozenset(cpus[core + thread * cores] for thread in range(spec.threads)) for core in range(cores)
        ]
    return [frozenset(cpus[core * spec.threads : (core + 1) * spec.threads]) for core in range(cores)]


def _status(spec: MachineSpec, online: IdSet) -> str:
    cpus = format_ids(online) if spec.allowed_cpus is None else spec.allowed_cpus
    mems = spec.allowed_mems
    if mems is None:
        mems = format_ids(node.id for node in spec.nodes if node.memory_bytes)
    return f"Name:\tpython\nCpus_allowed_list:\t{cpus}\nMems_allowed_list:\t{mems}"


def _cgroup_files(spec: MachineSpec) -> dict[str, str]:
    if not spec.memory_limits:
        return {}
    folders = ["/".join(("job", *(f"step{level}" for level in range(1, depth)))) for depth in range(1, 9)]
    used = folders[: len(spec.memory_limits)]
    return {
        "proc/self/cgroup": f"0::/{used[-1]}",
        "proc/self/mountinfo": "31 23 0:28 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw",
        **{
            f"sys/fs/cgroup/{folder}/memory.max": limit
            for folder, limit in zip(reversed(used), spec.memory_limits, strict=True)
        },
    }


def _node_files(spec: MachineSpec, node: NodeSpec, online: IdSet) -> dict[str, str]:
    at = f"sys/devices/system/node/node{node.id}"
    files = {
        f"{at}/cpulist": format_ids(parse_ids(node.cpus) & online),
        f"{at}/distance": " ".join(str(_distance(spec, node, other)) for other in spec.nodes),
    }
    if node.memory_bytes is not None:
        files[f"{at}/meminfo"] = f"Node {node.id} MemTotal:       {node.memory_bytes // 1024} kB"
    for core in core_groups(node, spec):
        for cpu in core:
            topology = f"sys/devices/system/cpu/cpu{cpu}/topology"
            if cpu in online:
                files[f"{topology}/thread_siblings_list"] = format_ids(core & online)
                files[f"{topology}/physical_package_id"] = str(-1 if node.package is None else node.package)
    return files


def _distance(spec: MachineSpec, node: NodeSpec, other: NodeSpec) -> int:
    if node is other:
        return 10
    return spec.near_distance if node.package == other.package is not None else spec.far_distance


def _bridge(gpu: GpuSpec) -> str:
    return f"pci{gpu.address[:7]}/{gpu.address[:4]}:00:01.0"


def _gpu_files(spec: MachineSpec, gpu: GpuSpec) -> dict[str, str]:
    at = f"sys/bus/pci/devices/{gpu.address}"
    if gpu.bridge_numa_node is not None:
        at = f"sys/devices/{_bridge(gpu)}/{gpu.address}"
    told = {
        f"{at}/vendor": gpu.vendor,
        f"{at}/device": gpu.device,
        f"{at}/class": gpu.pci_class,
        f"{at}/numa_node": None if gpu.numa_node is None else str(gpu.numa_node),
        f"{at}/local_cpulist": gpu.local_cpus,
    }
    files = {path: text for path, text in told.items() if text is not None}
    if gpu.bridge_numa_node is not None:
        files[f"sys/devices/{_bridge(gpu)}/numa_node"] = str(gpu.bridge_numa_node)
    if gpu.in_driver:
        folder = f"proc/driver/nvidia/gpus/{gpu.address}"
        files[f"{folder}/information"] = (
            f"Model: \t\t {gpu.name or ''}\nIRQ:   \t\t 100\nGPU UUID: \t {gpu.uuid or 'GPU-????????-????'}\n"
            f"Bus Location: \t {gpu.address}"
        )
    if gpu.in_driver and gpu.memory_node is not None:
        files[f"{folder}/numa_status"] = (
            f"Node:      {gpu.memory_node}\nStatus:    online\nAddress:   40000000000\n"
            f"Size:      {gpu.memory_bytes or 0:x}"
        )
    return files


def _uuid(index: int) -> str:
    return f"GPU-{index:08x}-0000-4000-8000-{index:012x}"


def _dgx() -> MachineSpec:
    """A DGX A100: 2 sockets x 4 nodes (NPS4), SMT2 with siblings last, 8 GPUs on four of the nodes."""
    buses = ("07", "0f", "47", "4e", "87", "90", "b7", "bd")
    places = (3, 3, 1, 1, 7, 7, 5, 5)
    return MachineSpec(
        nodes=tuple(
            NodeSpec(
                node,
                f"{node * 16}-{node * 16 + 15},{128 + node * 16}-{143 + node * 16}",
                node // 4,
                128 * GIB,
            )
            for node in range(8)
        ),
        gpus=tuple(
            GpuSpec(
                f"0000:{bus}:00.0",
                numa_node=place,
                device="0x20b0",
                in_driver=True,
                name="NVIDIA A100-SXM4-40GB",
                uuid=_uuid(index),
            )
            for index, (bus, place) in enumerate(zip(buses, places, strict=True))
        ),
        threads=2,
        siblings_last=True,
    )


def _gh200() -> MachineSpec:
    """A GH200: 72 cores on node 0, the GPU's memory on node 1, and nodes 2-8 kept empty for MIG instances."""
    return MachineSpec(
        nodes=(
            NodeSpec(0, "0-71", 0, 480 * GIB),
            NodeSpec(1, "", None, 96 * GIB),
            *(NodeSpec(node, "", None, 0) for node in range(2, 9)),
        ),
        gpus=(
            GpuSpec(
                "0009:01:00.0",
                numa_node=0,
                device="0x2342",
                in_driver=True,
                memory_node=1,
                memory_bytes=96 * GIB,
                name="NVIDIA GH200 480GB",
                uuid=_uuid(0),
            ),
        ),
        architecture="aarch64",
        generic_initiators="1-8",
        far_distance=80,
    )


def kfd_files(
    gpus: Sequence[tuple[str, int]], parts: int = 1, memory_bytes: int = 192 * GIB
) -> dict[str, str]:
    """What AMD's compute driver shows of two packages and GPUs, each an address and the kernel's unique id.

    As ``kfd_topology.c`` of Linux 6.10 writes it: the number of a part in bits 28 to 31 of ``location_id``,
    the memory dealt to the parts. The names of the lines are those of an MI300X's node.
    """
    at = "sys/devices/virtual/kfd/kfd/topology/nodes"
    files = {f"{at}/{node}/properties": "cpu_cores_count 96\nsimd_count 0\nlocation_id 0" for node in (0, 1)}
    nodes = [(address, unique, part) for address, unique in gpus for part in range(parts)]
    for number, (address, unique, part) in enumerate(nodes, 2):
        domain, bus, rest = address.split(":")
        device, _, function = rest.partition(".")
        location = part << 28 | int(bus, 16) << 8 | int(device, 16) << 3 | int(function)
        files[f"{at}/{number}/properties"] = (
            f"cpu_cores_count 0\nsimd_count {1216 // parts}\nmem_banks_count 1\ngfx_target_version 90402\n"
            f"vendor_id 4098\ndevice_id 29857\nlocation_id {location}\ndomain {int(domain, 16)}\n"
            f"drm_render_minor {126 + number}\nunique_id {unique}\nnum_xcc {8 // parts}"
        )
        files[f"{at}/{number}/mem_banks/0/properties"] = (
            f"heap_type 1\nsize_in_bytes {memory_bytes // parts}\nflags 0\nwidth 8192\nmem_clk_max 1300"
        )
    return files


MI300X = (("05", 0), ("26", 0), ("46", 0), ("65", 0), ("85", 1), ("a6", 1), ("c6", 1), ("e5", 1))
"""Bus and NUMA node of the eight GPUs of a server, as rocm-smi prints them."""


def _mi300x(parts: int) -> MachineSpec:
    """A server with eight MI300X in mode SPX (1 part), DPX (2) or CPX (8)."""
    gpus = tuple(
        GpuSpec(f"0000:{bus}:00.0", node, vendor="0x1002", device="0x74a1", pci_class="0x120000")
        for bus, node in MI300X
    )
    ids = [(gpu.address, 0x5AB0F8C2D1E30000 + number) for number, gpu in enumerate(gpus)]
    names = {f"sys/bus/pci/devices/{address}/unique_id": f"{unique:016x}" for address, unique in ids}
    return MachineSpec(
        nodes=(NodeSpec(0, "0-95", 0, 1152 * GIB), NodeSpec(1, "96-191", 1, 1152 * GIB)),
        gpus=gpus,
        threads=1,
        extra={**names, **kfd_files(ids, parts)},
    )


def _ac922() -> MachineSpec:
    """A 4-GPU AC922: CPU nodes 0 and 8, SMT4, GPU memory as nodes 252-255."""
    return MachineSpec(
        nodes=(
            NodeSpec(0, "0-63", 0, 256 * GIB),
            NodeSpec(8, "64-127", 8, 256 * GIB),
            *(NodeSpec(node, "", None, 16 * GIB) for node in range(252, 256)),
        ),
        gpus=tuple(
            GpuSpec(
                address,
                numa_node=place,
                in_driver=True,
                memory_node=255 - index,
                memory_bytes=16 * GIB,
                name="Tesla V100-SXM2-16GB",
                uuid=_uuid(index),
            )
            for index, (address, place) in enumerate(
                (("0004:04:00.0", 0), ("0004:05:00.0", 0), ("0035:03:00.0", 8), ("0035:04:00.0", 8))
            )
        ),
        threads=4,
        architecture="ppc64le",
        far_distance=80,
    )


SPECS: dict[str, MachineSpec] = {
    "dgx": _dgx(),
    "gh200": _gh200(),
    "ac922": _ac922(),
    "mi300x": _mi300x(1),
    "mi300x-dpx": _mi300x(2),
    "mi300x-cpx": _mi300x(8),
    "single": MachineSpec(nodes=(NodeSpec(0, "0-7", 0, 32 * GIB),), threads=2, siblings_last=True),
    "single-gpu-unknown": MachineSpec(
        nodes=(NodeSpec(0, "0-7", 0, 32 * GIB),),
        gpus=(GpuSpec("0000:01:00.0", numa_node=-1, local_cpus="0-7"),),
    ),
    # A batch job's share of a two-socket machine: six of socket 1's cores and its memory.
    "cpuset": MachineSpec(
        nodes=(NodeSpec(0, "0-15", 0, 64 * GIB), NodeSpec(1, "16-31", 1, 64 * GIB)),
        gpus=(GpuSpec("0000:3b:00.0", numa_node=0), GpuSpec("0000:d8:00.0", numa_node=1)),
        threads=2,
        allowed_cpus="18-29",
        allowed_mems="1",
        memory_limits=("max", str(24 * GIB)),
    ),
    # SMT8 switched down to 4 threads, and whole cores offline: ids with holes.
    "smt8-offline": MachineSpec(
        nodes=(NodeSpec(0, "0-31", 0, 64 * GIB), NodeSpec(1, "64-95", 1, 64 * GIB)),
        gpus=(GpuSpec("0002:01:00.0", numa_node=0), GpuSpec("000a:01:00.0", numa_node=1)),
        threads=8,
        offline="4-7,8-15,20-23,28-31,68-71,76-79,84-87,92-95",
        architecture="ppc64le",
    ),
    "memless": MachineSpec(
        nodes=(NodeSpec(0, "0-3", 0, 16 * GIB), NodeSpec(1, "4-7", 1, 0)),
        gpus=(GpuSpec("0000:3b:00.0", numa_node=0), GpuSpec("0000:d8:00.0", numa_node=1)),
    ),
    "cxl": MachineSpec(
        nodes=(NodeSpec(0, "0-7", 0, 32 * GIB), NodeSpec(1, "", None, 128 * GIB)),
        gpus=(GpuSpec("0000:3b:00.0", numa_node=0),),
    ),
    # Two sockets, and firmware that does not say where the GPUs hang.
    "unknown-node": MachineSpec(
        nodes=(NodeSpec(0, "0-7", 0, 32 * GIB), NodeSpec(1, "8-15", 1, 32 * GIB)),
        gpus=(
            GpuSpec("0000:3b:00.0", numa_node=-1, local_cpus="0-15"),
            GpuSpec("0000:d8:00.0", numa_node=-1),
        ),
    ),
}
"""Machines by name."""
