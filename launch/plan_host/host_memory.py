"""How much pinned host memory each rank may take: what its GPU would like, cut to what the machine can keep.

The limit is a cap that TensorFlow grows into on demand. A cap above what the NUMA node or the cgroup has
fails in the middle of training, so that it is cut here, with the arithmetic shown.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from launch.model.errors import PlanError
from launch.model.idset import IdSet, format_ids
from launch.model.settings import MIB, PlanSettings
from launch.model.text import count_of
from launch.model.topology import Machine, NumaNode
from launch.plan_host.placement import Placement, say_by_rank

_PARTS = 10**9
"""Options such as 0.1 are counted in these, so that floors are exact where binary fractions are not."""

LEAST_MB = 1024
"""A rank that keeps less is refused, unless its GPU has less still: TensorFlow with a GPU takes more than
this without any tensor."""


@dataclass(frozen=True)
class RankMemory:
    """The host memory of one rank.

    ``mem_nodes`` empty means: no node of its own; ``limit_mb`` None: nothing to size.
    ``fits`` is False where the limit exceeds the rank's share of its nodes, and None where that is unknown.
    """

    mem_nodes: IdSet
    limit_mb: int | None = None
    fits: bool | None = True


@dataclass(frozen=True)
class HostMemory:
    """The memory of every rank of a host in order of local rank, and what a person should know of it."""

    ranks: tuple[RankMemory, ...]
    warnings: tuple[str, ...] = ()


def plan_host_memory(machine: Machine, placements: Sequence[Placement], settings: PlanSettings) -> HostMemory:
    """Give every rank its memory nodes and its limit.

    Raises:
        PlanError: If hardly anything remains (:data:`LEAST_MB`), or with ``--strict`` if a limit was cut,
            cannot be checked or is unknown.
    """
    wishes = [_wish_mb(placement, settings) for placement in placements]
    near = [_memory_nodes(machine, placement) for placement in placements]
    # Strict ranks keep to their own node, with a limit that fits there.
    wide = near if settings.numa == "strict" else _widen(machine, placements, near, wishes, settings)
    pools = _build_pools(machine, wide, settings)
    ranks = [_limit(*each, settings) for each in zip(placements, wishes, wide, pools, strict=True)]
    return HostMemory(
        tuple(memory for memory, _ in ranks),
        (
            *_say_moved(machine, placements, near, wide),
            *_say_unknown(placements, wishes, settings),
            *say_by_rank(
                [(placement.local_rank, why) for placement, (_, why) in zip(placements, ranks, strict=True)]
            ),
        ),
    )


def dram_nodes(machine: Machine) -> tuple[NumaNode, ...]:
    """Find the nodes whose memory this process may use and that is plain host memory."""
    return tuple(
        node
        for node in machine.numa_nodes
        if node.kind == "dram" and node.id in machine.allowed.mems and node.memory_bytes != 0
    )


def _gpu_bytes(placement: Placement, settings: PlanSettings) -> int | None:
    return settings.gpu_memory_bytes or (placement.gpu.memory_bytes if placement.gpu else None)


def _wish_mb(placement: Placement, settings: PlanSettings) -> int | None:
    if settings.host_mem_limit_mb is not None:
        return settings.host_mem_limit_mb
    known = _gpu_bytes(placement, settings)
    return round(settings.host_mem_multiplier * _PARTS) * known // (_PARTS * MIB) if known else None


def _home(machine: Machine, placement: Placement) -> NumaNode | None:
    return None if placement.numa_node is None else machine.numa_node(placement.numa_node)


def _memory_nodes(machine: Machine, placement: Placement) -> IdSet:
    """Choose the rank's own node; if its memory cannot be used the package's, else the nearest, else all."""
    usable = {node.id: node for node in dram_nodes(machine)}
    home = _home(machine, placement)
    if home is None or not placement.cpus:
        return frozenset()
    if len(placement.numa_nodes) > 1 and (several := placement.numa_nodes & usable.keys()):
        return frozenset(several)
    if home.id in usable:
        return frozenset({home.id})
    package = _package_nodes(machine, home)
    if package:
        return package
    known = {other: distance for other, distance in home.distances if other in usable}
    return frozenset(other for other in usable if not known or known.get(other) == min(known.values()))


def _package_nodes(machine: Machine, home: NumaNode) -> IdSet:
    return frozenset(
        node.id for node in dram_nodes(machine) if home.package is not None and node.package == home.package
    )


def _widen(
    machine: Machine,
    placements: Sequence[Placement],
    near: Sequence[IdSet],
    wishes: Sequence[int | None],
    settings: PlanSettings,
) -> list[IdSet]:
    """Where a node is too small and its package has more nodes, give the package's ranks all of them.

    All ranks of the package move together, so that every pool is shared by whole groups and sums stay true.
    """
    tight: set[int | None] = set()
    pools = _build_pools(machine, near, settings)
    for placement, pool, wish in zip(placements, pools, wishes, strict=True):
        home = _home(machine, placement)
        if home and wish and pool.node_share_mb is not None and wish > pool.node_share_mb:
            tight.add(home.package)
    wide = []
    for placement, nodes in zip(placements, near, strict=True):
        home = _home(machine, placement)
        wide.append(
            nodes | _package_nodes(machine, home) if home and nodes and home.package in tight else nodes
        )
    return wide


class _Pool:
    """What one rank's share of its memory nodes and of the cgroup is, and how that is said."""

    def __init__(
        self, machine: Machine, nodes: IdSet, groups: Sequence[IdSet], local_ranks: int, reserve: float
    ) -> None:
        sizes = [
            node.memory_bytes for node in dram_nodes(machine) if node.id in (nodes or machine.allowed.mems)
        ]
        self._nodes, self._reserve, self._local_ranks = nodes, reserve, local_ranks
        self._bytes = None if not sizes or None in sizes else sum(size or 0 for size in sizes)
        # A rank without nodes of its own may use every node, so that it shares in each of them.
        self._sharers = sum(1 for group in groups if not nodes or not group or group & nodes)
        self._cgroup_bytes = machine.limits.memory_bytes
        self.node_share_mb = self._share(self._bytes, self._sharers)
        self.cgroup_share_mb = self._share(self._cgroup_bytes, local_ranks)

    def _share(self, pool_bytes: int | None, ranks: int) -> int | None:
        if pool_bytes is None:
            return None
        return (_PARTS - round(self._reserve * _PARTS)) * pool_bytes // (_PARTS * MIB * ranks)

    @property
    def share_mb(self) -> int | None:
        """The rank's share in MiB; None when neither the nodes' memory nor a cgroup limit is known."""
        known = [share for share in (self.node_share_mb, self.cgroup_share_mb) if share is not None]
        return min(known, default=None)

    def holds(self, limit_mb: int) -> bool | None:
        """Whether a limit fits the rank's share of its nodes; None when their memory is unknown."""
        return None if self.node_share_mb is None else limit_mb <= self.node_share_mb

    def arithmetic(self) -> str:
        """Render the share as a formula."""
        if self.share_mb == self.node_share_mb and self._bytes is not None:
            nodes = f"node{'s' * (len(self._nodes) > 1)} {format_ids(self._nodes)}"
            where = f"memory of {nodes}" if self._nodes else "host memory"
            pool_bytes, ranks = self._bytes, self._sharers
        else:
            where, pool_bytes, ranks = "cgroup limit", self._cgroup_bytes or 0, self._local_ranks
        return (
            f"(1 - {self._reserve:g}) x {pool_bytes // MIB} MiB {where} / {count_of(ranks, 'rank')} "
            f"= {self.share_mb} MiB"
        )


def _build_pools(machine: Machine, groups: Sequence[IdSet], settings: PlanSettings) -> list[_Pool]:
    """Build every rank's pool; ranks with the same nodes have one, for each looks at all ranks."""
    reserve = settings.host_mem_reserve
    pools = {nodes: _Pool(machine, nodes, groups, len(groups), reserve) for nodes in set(groups)}
    return [pools[nodes] for nodes in groups]


def _limit(
    placement: Placement, wish: int | None, nodes: IdSet, pool: _Pool, settings: PlanSettings
) -> tuple[RankMemory, str | None]:
    """One rank's limit, and why it is not its wish."""
    share, gpu_mb = pool.share_mb, (_gpu_bytes(placement, settings) or 0) / MIB
    if wish is None:
        return RankMemory(nodes), None
    if share is None:
        why = f"host memory limit {wish} MiB is unchecked: the host's memory is unknown"
        return RankMemory(nodes, wish, None), _or_error(why, settings, "a topology that tells it")
    if wish <= share:
        return RankMemory(nodes, wish, pool.holds(wish)), None
    if settings.host_mem_limit_mb is not None:
        why = f"host memory limit {wish} MiB, as asked for, is above the rank's share: {pool.arithmetic()}"
        return RankMemory(nodes, wish, pool.holds(wish)), _or_error(why, settings)
    if share < (least := min(LEAST_MB, int(gpu_mb))):
        raise PlanError(
            f"rank {placement.local_rank} keeps {share} MiB of host memory, less than the {least} MiB "
            f"that a rank needs: {pool.arithmetic()}; try fewer ranks, more memory for the job, or "
            "--host-mem-limit MB"
        )
    asked = f"{settings.host_mem_multiplier:g} x {gpu_mb:.8g} MiB of GPU memory = {wish} MiB"
    why = f"host memory limit clamped to {share} MiB: {asked} wanted, {pool.arithmetic()} there"
    return RankMemory(nodes, share, pool.holds(share)), _or_error(why, settings)


def _or_error(
    why: str, settings: PlanSettings, hint: str = "--host-mem-multiplier, --host-mem-limit, or fewer ranks"
) -> str:
    if settings.strict:
        raise PlanError(f"--strict: {why}; try {hint}")
    return why


def _say_moved(
    machine: Machine, placements: Sequence[Placement], near: Sequence[IdSet], wide: Sequence[IdSet]
) -> list[str]:
    said = []
    for placement, before, after in zip(placements, near, wide, strict=True):
        why = None
        if after != before:
            why = f"one NUMA node is too small, so memory widens to nodes {format_ids(after)} of its package"
        elif after and placement.numa_node not in after:
            why = f"node {placement.numa_node} has no memory for this job; node {format_ids(after)} serves"
        elif placement.cpus and not after:
            why = "no NUMA node's memory can be named for it, so memory is not bound"
        said.append((placement.local_rank, why))
    return say_by_rank(said) if machine.numa_nodes else []


def _say_unknown(
    placements: Sequence[Placement], wishes: Sequence[int | None], settings: PlanSettings
) -> list[str]:
    blind = [
        (
            placement.local_rank,
            "GPU memory cannot be read, so no host memory limit is set; give --gpu-memory SIZE",
        )
        for placement, wish in zip(placements, wishes, strict=True)
        if placement.gpu and wish is None
    ]
    for said in say_by_rank(blind) if settings.strict else ():
        raise PlanError(f"--strict: {said}")
    asked = settings.gpu_memory_bytes
    read = [
        (
            placement.local_rank,
            f"--gpu-memory {asked // MIB} MiB counts; its GPU has {placement.gpu.memory_bytes // MIB} MiB",
        )
        for placement in placements
        if asked and placement.gpu and placement.gpu.memory_bytes not in (None, asked)
    ]
    return say_by_rank([*blind, *read])
