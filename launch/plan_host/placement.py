"""Which GPU, NUMA node and cores each rank of one host gets. Pure: a Machine goes in, placements come out."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from launch.model.idset import IdSet, format_ids
from launch.model.text import count_of
from launch.model.topology import Core, Gpu, Machine


@dataclass(frozen=True)
class Placement:
    """Where one rank sits. ``cpus`` empty means: not bound; ``cores`` is what its thread counts follow."""

    local_rank: int
    gpu: Gpu | None
    numa_node: int | None
    cpus: IdSet
    cores: int


@dataclass(frozen=True)
class HostPlacement:
    """The placements of one host in order of local rank, and what a person should know of them."""

    ranks: tuple[Placement, ...]
    warnings: tuple[str, ...] = ()


def count_slots(machine: Machine, gpus: Sequence[Gpu]) -> int:
    """How many ranks fit: one a GPU, or without GPUs one a physical core that this process may use."""
    return len(gpus) or len(allowed_cores(machine))


def allowed_cores(machine: Machine) -> tuple[Core, ...]:
    """The physical cores with an allowed PU, cut down to their allowed PUs, in order of their first PU.

    PUs that no core claims (a topology that lists none) each count as a core of their own.
    """
    allowed = machine.allowed.cpus
    cut = [
        Core(core.package, core.numa_node, core.cpus & allowed)
        for core in machine.cores
        if core.cpus & allowed
    ]
    for cpu in sorted(allowed.difference(*(core.cpus for core in machine.cores))):
        numa_node = next((node.id for node in machine.numa_nodes if cpu in node.cpus), None)
        cut.append(Core(None, numa_node, frozenset({cpu})))
    return tuple(sorted(cut, key=lambda core: min(core.cpus)))


def place_ranks(machine: Machine, gpus: Sequence[Gpu], count: int) -> HostPlacement:
    """Place ``count`` ranks on a machine.

    Rank i takes GPU i; ranks without GPUs are dealt over the nodes that have cores. The ranks of a node share
    its allowed cores evenly: whole cores with all their allowed PUs, in contiguous runs, the remainder to the
    first ranks.

    Args:
        machine: What is there and what may be used.
        gpus: The job's GPUs in PCI order; more ranks than GPUs share them round-robin.
        count: How many ranks, at least 1.
    """
    cores = allowed_cores(machine)
    cores_of = _cores_by_node(cores)
    taken = tuple(gpus[rank % len(gpus)] for rank in range(count)) if gpus else (None,) * count
    if gpus:
        # Cores on no node are near no GPU; a rank whose GPU has no known node is not bound to them either.
        cores_of = {node: cores for node, cores in cores_of.items() if node is not None}
        homes, warnings = _gpu_homes(machine, tuple(gpu for gpu in taken if gpu), cores_of)
    else:
        homes, warnings = _deal(cores_of, count), []
    shares = _share_cores(homes, cores_of)
    spare = max(1, len(cores) // count)
    placements = tuple(
        Placement(rank, gpu, home, _cpus(share), len(share) or spare)
        for rank, (gpu, home, share) in enumerate(zip(taken, homes, shares, strict=True))
    )
    return HostPlacement(placements, (*warnings, *_crowding(homes, cores_of)))


def say_by_rank(said: Sequence[tuple[int, str | None]]) -> list[str]:
    """One line for all ranks of which the same is to be said; None says nothing."""
    ranks_of: dict[str, list[int]] = {}
    for rank, why in said:
        if why:
            ranks_of.setdefault(why, []).append(rank)
    return [f"rank{'s' * (len(ranks) > 1)} {format_ids(ranks)}: {why}" for why, ranks in ranks_of.items()]


_NodeCores = dict[int | None, tuple[Core, ...]]


def _cores_by_node(cores: Sequence[Core]) -> _NodeCores:
    cores_of: dict[int | None, list[Core]] = {}
    for core in sorted(cores, key=lambda core: (core.numa_node is None, core.numa_node or 0)):
        cores_of.setdefault(core.numa_node, []).append(core)
    return {node: tuple(cores) for node, cores in cores_of.items()}


def _cpus(cores: Sequence[Core]) -> IdSet:
    return frozenset().union(*(core.cpus for core in cores))


def _deal(cores_of: _NodeCores, count: int) -> list[int | None]:
    """Round-robin in proportion to cores (Sainte-Laguë's divisors); none above its cores till all are."""
    total, dealt = sum(map(len, cores_of.values())), Counter[int | None]()
    homes: list[int | None] = []
    for position in range(count):
        open_nodes = [
            node for node, cores in cores_of.items() if dealt[node] < len(cores) or position >= total
        ]
        home = max(
            open_nodes,
            key=lambda node: (len(cores_of[node]) / (2 * dealt[node] + 1), -dealt[node]),
            default=None,
        )
        dealt[home] += 1
        homes.append(home)
    return homes


def _gpu_homes(
    machine: Machine, gpus: Sequence[Gpu], cores_of: _NodeCores
) -> tuple[list[int | None], list[str]]:
    """The node whose cores each GPU's rank gets; among equally near nodes the one with most cores a rank."""
    homes: list[int | None] = []
    odd: dict[str, dict[str, None]] = {}
    load: Counter[int | None] = Counter()
    for gpu in gpus:
        near, why = _near_nodes(machine, gpu, cores_of)
        home = max(near, key=lambda node: len(cores_of[node]) / (load[node] + 1), default=None)
        if why:
            odd.setdefault(f"{why}; node {home} serves" if near else why, {})[_gpu_text(gpu)] = None
        load[home] += 1
        homes.append(home)
    return homes, [f"{' and '.join(which)}: {why}" for why, which in odd.items()]


def _gpu_text(gpu: Gpu) -> str:
    return f"GPU {gpu.index} ({gpu.pci_bus_id or gpu.uuid})"


def _near_nodes(machine: Machine, gpu: Gpu, cores_of: _NodeCores) -> tuple[list[int], str | None]:
    """Nodes with usable cores that are nearest to a GPU, and what was odd about finding them."""
    usable = [node for node in cores_of if node is not None]
    if gpu.numa_node in usable:
        return [gpu.numa_node], None
    beside = [node for node in usable if gpu.cpus & _cpus(cores_of[node])]
    if gpu.numa_node is None and beside:
        return beside, None
    if beside:
        return beside, _no_cpu(gpu)
    if gpu.numa_node is None:
        if len(usable) == 1:
            return usable, None
        return [], (
            "its rank is not bound, for no NUMA node is known to be near; try `lmsrun topo --save FILE`, "
            "fill in numa_node there, and --topology FILE"
        )
    nearest = _nearest(machine, gpu.numa_node, usable)
    if nearest:
        return nearest, _no_cpu(gpu)
    return [], f"{_no_cpu(gpu)}, so its rank is not bound; widen the cpuset, or choose others with --gpus"


def _no_cpu(gpu: Gpu) -> str:
    return f"its node {gpu.numa_node} has no CPU that this job may use"


def _nearest(machine: Machine, origin: int, candidates: Sequence[int]) -> list[int]:
    """The candidates at the least distance of a node; none when distances are unknown."""
    node = machine.numa_node(origin)
    known = {other: distance for other, distance in (node.distances if node else ()) if other in candidates}
    return [other for other in candidates if known and known.get(other) == min(known.values())]


def _share_cores(homes: Sequence[int | None], cores_of: _NodeCores) -> list[tuple[Core, ...]]:
    """Each rank's run of its home's cores; with more ranks than cores, neighbours share one."""
    sharers, seen = Counter(homes), Counter[int | None]()
    shares = []
    for home in homes:
        cores, ranks, turn = cores_of.get(home, ()), sharers[home], seen[home]
        seen[home] += 1
        if len(cores) >= ranks:
            size, more = divmod(len(cores), ranks)
            first = turn * size + min(turn, more)
            shares.append(cores[first : first + size + (turn < more)])
        else:
            first = turn * len(cores) // ranks
            shares.append(cores[first : first + 1])
    return shares


def _crowding(homes: Sequence[int | None], cores_of: _NodeCores) -> list[str]:
    return [
        f"{ranks} ranks share the {count_of(len(cores), 'core')} of node {node} "
        f"(CPUs {format_ids(_cpus(cores))}) that this job may use; fewer ranks or a wider cpuset would help"
        for node, cores in cores_of.items()
        if cores and (ranks := homes.count(node)) > len(cores)
    ]
