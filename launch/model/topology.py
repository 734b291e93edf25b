"""One machine as a frozen value: packages, NUMA nodes, cores, GPUs and what this process may use of them."""

from dataclasses import dataclass, field
from typing import Literal

from launch.model.idset import IdSet

MemoryKind = Literal["dram", "gpu", "memory-only"]
"""``dram`` has CPUs beside it or is plain host memory; ``gpu`` is a GPU's own memory shown as a node;
``memory-only`` is any other node without CPUs (CXL, HBM, persistent memory)."""

SCHEMA = "lmsrun.topology/1"
MAX_NUMA_NODES = 512
"""Twice as many as the largest machine that was built; their distances are the square of it."""
MAX_GPUS = 256
"""No host has more; placement compares each GPU with each node."""


@dataclass(frozen=True)
class Package:
    """A processor package ("socket" in text for people). ``cpus`` are online PUs."""

    id: int
    cpus: IdSet
    numa_nodes: tuple[int, ...]


@dataclass(frozen=True)
class NumaNode:
    """A NUMA node of the kernel. ``package`` is None without CPUs; ``memory_bytes`` None is unknown."""

    id: int
    package: int | None
    cpus: IdSet
    memory_bytes: int | None
    kind: MemoryKind
    distances: tuple[tuple[int, int], ...] = ()
    """(other node id, SLIT distance) in ascending id; empty when unknown."""


@dataclass(frozen=True)
class Core:
    """A physical core: its online PUs (hardware threads), in one package and at most one NUMA node."""

    package: int | None
    numa_node: int | None
    cpus: IdSet


@dataclass(frozen=True)
class Gpu:
    """A GPU by PCI address; ``numa_node`` None is unknown, never 0.

    ``index`` is its place in PCI order, or for AMD's GPUs, where their compute driver is, as HIP counts.
    """

    index: int
    pci_bus_id: str
    """``dddd:bb:dd.f``, lower case."""
    name: str | None = None
    uuid: str | None = None
    numa_node: int | None = None
    cpus: IdSet = frozenset()
    """PUs near the GPU; empty when unknown."""
    memory_bytes: int | None = None
    vendor: Literal["nvidia", "amd"] | None = None
    partition: int | None = None
    """Which part it is of the GPU at this address, where AMD's driver has made several of it."""

    @property
    def address(self) -> str:
        """Its PCI address for people, with the number of the part: ``0000:05:00.0/3``."""
        return self.pci_bus_id if self.partition is None else f"{self.pci_bus_id}/{self.partition}"


@dataclass(frozen=True)
class Adapter:
    """A port of a network adapter with RDMA that has a link. ``numa_node`` None is unknown."""

    name: str
    """Device and port as UCX and NCCL name them: ``mlx5_0:1``."""
    numa_node: int | None
    near_gpus: tuple[tuple[str, int], ...] = ()
    """(PCI address of a GPU, how many bridges it shares with the adapter), where it shares any."""


@dataclass(frozen=True)
class Allowed:
    """What this process may use: its affinity and cpuset. Every id here exists on the machine."""

    cpus: IdSet
    mems: IdSet


@dataclass(frozen=True)
class Limits:
    """Limits beyond the hardware; None is no limit or unknown."""

    memory_bytes: int | None = None
    """The tightest cgroup memory limit on the way to the root."""
    memlock_bytes: int | None = None
    set_mempolicy: bool | None = None
    """Whether the kernel lets this process set a memory policy (Docker's default seccomp filter does not)."""
    cpu_millis: int | None = None
    """The CPU time that cgroups give, in thousandths of a CPU, on however many it is spent: the tightest."""


@dataclass(frozen=True)
class Machine:
    """Everything the planner needs to know of one host."""

    source: str
    architecture: str
    packages: tuple[Package, ...]
    numa_nodes: tuple[NumaNode, ...]
    cores: tuple[Core, ...]
    gpus: tuple[Gpu, ...]
    allowed: Allowed
    limits: Limits = field(default_factory=Limits)
    warnings: tuple[str, ...] = ()
    adapters: tuple[Adapter, ...] = ()

    @property
    def cpus_of_time(self) -> int | None:
        """Whole CPUs whose time the cgroups give, one at least; None where they give all."""
        millis = self.limits.cpu_millis
        return None if millis is None else max(1, millis // 1000)

    def numa_node(self, numa_node_id: int) -> NumaNode | None:
        """Find the node with this OS index; None when there is none."""
        return next((node for node in self.numa_nodes if node.id == numa_node_id), None)
