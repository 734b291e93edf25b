"""Which GPU, NUMA node and cores each rank of one host gets. Pure: a Machine goes in, placements come out."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from launch.model.idset import IdSet, format_ids
from launch.model.settings import Place, Span
from launch.model.text import count_of, name_ids
from launch.model.topology import Core, Gpu, Machine


@dataclass(frozen=True)
class Placement:
    """Where one rank sits. ``cpus`` empty means: not bound; ``cores`` is what its thread counts follow."""

    local_rank: int
    gpu: Gpu | None
    numa_node: int | None
    """Its node, or the first of several."""
    cpus: IdSet
    cores: int
    numa_nodes: IdSet = frozenset()
    """All of its nodes."""
    runs: tuple[Core, ...] = ()
    """The cores themselves, each cut to what the rank may use."""


@dataclass(frozen=True)
class HostPlacement:
    """The placements of one host in order of local rank, and what a person should know of them."""

    ranks: tuple[Placement, ...]
    warnings: tuple[str, ...] = ()


def count_slots(machine: Machine, gpus: Sequence[Gpu]) -> int:
    """How many ranks fit: one a GPU, or without GPUs one a physical core that this process may use."""
    return len(gpus) or len(allowed_cores(machine))


def allowed_cores(machine: Machine) -> tuple[Core, ...]:
    """List the physical cores with an allowed PU, cut down to their allowed PUs, in order of their first PU.

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


@dataclass(frozen=True)
class Seating:
    """How ranks are spread over a machine, beside what is near their GPUs."""

    place: Place = "auto"
    span: Span = "auto"
    busy: IdSet = frozenset()
    """CPUs of other jobs: cores without them are taken first."""


def place_ranks(
    machine: Machine, gpus: Sequence[Gpu], count: int, seating: Seating = Seating()
) -> HostPlacement:
    """Place ``count`` ranks on a machine.

    Rank i takes GPU i; ranks without GPUs are dealt over the nodes that have cores, and get several nodes
    each where they are fewer. The ranks of a node share its allowed cores evenly: whole cores with all their
    allowed PUs, in contiguous runs, the remainder to the first ranks. Cores that other jobs have are left out
    where the others suffice.

    Args:
        machine: What is there and what may be used.
        gpus: The job's GPUs in PCI order; more ranks than GPUs share them round-robin.
        count: How many ranks, at least 1.
        seating: What the settings and other jobs have to say.
    """
    cores = allowed_cores(machine)
    cores_of = _cores_by_node(cores)
    taken = tuple(gpus[rank % len(gpus)] for rank in range(count)) if gpus else (None,) * count
    warnings: list[str] = []
    if gpus:
        # Cores on no node are near no GPU; a rank whose GPU has no known node is not bound to them either.
        cores_of = {node: cores for node, cores in cores_of.items() if node is not None}
        near, warnings = _gpu_homes(machine, [gpu for gpu in taken if gpu], cores_of, seating.span == "on")
        homes = _join(near)
    else:
        cores_of = _cores_by_node(_free_first(cores, count, seating.busy))
        homes = _deal_nodes(cores_of, count, seating)
    cores_of_home = {home: tuple(core for node in home for core in cores_of.get(node, ())) for home in homes}
    free_of_home = {
        home: _free_first(own, homes.count(home), seating.busy) for home, own in cores_of_home.items()
    }
    shares = _share_cores(homes, free_of_home)
    spare = max(1, len(cores) // count)
    placements = tuple(
        Placement(
            rank, gpu, home[0] if home else None, _cpus(share), len(share) or spare, _node_ids(home), share
        )
        for rank, (gpu, home, share) in enumerate(zip(taken, homes, shares, strict=True))
    )
    return HostPlacement(placements, (*warnings, *_crowding(homes, cores_of_home)))


def _free_first(cores: tuple[Core, ...], ranks: int, busy: IdSet) -> tuple[Core, ...]:
    """Leave out the cores of other jobs, if every rank still gets one."""
    free = tuple(core for core in cores if not core.cpus & busy)
    return free if len(free) >= ranks else cores


def _node_ids(home: "_Home") -> IdSet:
    return frozenset(node for node in home if node is not None)


def say_by_rank(said: Sequence[tuple[int, str | None]]) -> list[str]:
    """One line for all ranks of which the same is to be said; None says nothing."""
    ranks_of: dict[str, list[int]] = {}
    for rank, why in said:
        if why:
            ranks_of.setdefault(why, []).append(rank)
    return [f"{name_ids('rank', format_ids(ranks))}: {why}" for why, ranks in ranks_of.items()]


_NodeCores = dict[int | None, tuple[Core, ...]]
_Home = tuple[int | None, ...]
"""The nodes of a rank; empty when none is known to be near it."""


def _cores_by_node(cores: Sequence[Core]) -> _NodeCores:
    cores_of: dict[int | None, list[Core]] = {}
    for core in sorted(cores, key=lambda core: _node_order(core.numa_node)):
        cores_of.setdefault(core.numa_node, []).append(core)
    return {node: tuple(cores) for node, cores in cores_of.items()}


def _cpus(cores: Sequence[Core]) -> IdSet:
    return frozenset().union(*(core.cpus for core in cores))


def _deal_nodes(cores_of: _NodeCores, count: int, seating: Seating) -> list[_Home]:
    """Deal ranks without GPUs over the nodes, or the nodes over ranks that are fewer."""
    if seating.place == "packed":
        cores_of = _fewest(cores_of, count)
    nodes = list(cores_of)
    spans = seating.span == "on" or (seating.span == "auto" and seating.place != "packed")
    if spans and count < len(nodes):
        edges = [rank * len(nodes) // count for rank in range(count + 1)]
        return [tuple(nodes[first:last]) for first, last in pairwise(edges)]
    return [(home,) for home in _deal(cores_of, count)]


def _fewest(cores_of: _NodeCores, count: int) -> _NodeCores:
    """Keep the first nodes that have a core for every rank."""
    kept: _NodeCores = {}
    for node, cores in cores_of.items():
        if sum(map(len, kept.values())) < count:
            kept[node] = cores
    return kept


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
    machine: Machine, gpus: Sequence[Gpu], cores_of: _NodeCores, spans: bool
) -> tuple[list[_Home], list[str]]:
    """Choose the node whose cores each GPU's rank gets; of equally near ones that with most cores per rank.

    Args:
        machine: Whose GPUs.
        gpus: One a rank.
        cores_of: What may be used.
        spans: Whether a rank gets all of the nodes that are equally near, not one.
    """
    homes: list[_Home] = []
    odd: dict[str, dict[str, None]] = {}
    load: Counter[int | None] = Counter()
    for gpu in gpus:
        near, why = _near_nodes(machine, gpu, cores_of)
        best = max(near, key=lambda node: len(cores_of[node]) / (load[node] + 1), default=None)
        home: _Home = tuple(near) if spans else () if best is None else (best,)
        if why:
            serving = f"{why}; node {format_ids(_node_ids(home))} serves" if near else why
            odd.setdefault(serving, {})[_gpu_text(gpu)] = None
        load.update(home)
        homes.append(home)
    return homes, [f"{' and '.join(which)}: {why}" for why, which in odd.items()]


def _join(homes: Sequence[_Home]) -> list[_Home]:
    """Join homes that overlap, so that the ranks of a node share it as a whole or not at all."""
    groups: list[set[int | None]] = []
    for home in homes:
        touched = [group for group in groups if group & set(home)]
        groups = [group for group in groups if group not in touched]
        groups += [set(home).union(*touched)] if home else []
    joined = {node: tuple(sorted(group, key=_node_order)) for group in groups for node in group}
    return [joined[home[0]] if home else () for home in homes]


def _node_order(node: int | None) -> tuple[bool, int]:
    return (node is None, node or 0)


def _gpu_text(gpu: Gpu) -> str:
    return f"GPU {gpu.index} ({gpu.address or gpu.uuid})"


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
    """Choose the candidates at the least distance of a node; none when distances are unknown."""
    node = machine.numa_node(origin)
    known = {other: distance for other, distance in (node.distances if node else ()) if other in candidates}
    return [other for other in candidates if known and known.get(other) == min(known.values())]


def _share_cores(
    homes: Sequence[_Home], cores_of: Mapping[_Home, tuple[Core, ...]]
) -> list[tuple[Core, ...]]:
    """Each rank's run of its home's cores; with more ranks than cores, neighbours share one."""
    sharers, seen = Counter(homes), Counter[_Home]()
    shares = []
    for home in homes:
        cores, ranks, turn = cores_of[home], sharers[home], seen[home]
        seen[home] += 1
        if len(cores) >= ranks:
            size, more = divmod(len(cores), ranks)
            first = turn * size + min(turn, more)
            shares.append(cores[first : first + size + (turn < more)])
        else:
            first = turn * len(cores) // ranks
            shares.append(cores[first : first + 1])
    return shares


def _crowding(homes: Sequence[_Home], cores_of: Mapping[_Home, tuple[Core, ...]]) -> list[str]:
    return [
        f"{ranks} ranks share the {count_of(len(cores), 'core')} of node {_home_text(home)} "
        f"(CPUs {format_ids(_cpus(cores))}) that this job may use; fewer ranks or a wider cpuset would help"
        for home, cores in cores_of.items()
        if cores and (ranks := homes.count(home)) > len(cores)
    ]


def _home_text(home: _Home) -> str:
    return format_ids(_node_ids(home)) or "None"
