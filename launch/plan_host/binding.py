"""How a rank is bound: the ladder from strict memory binding down to nothing, each step down said.

    numactl or libnuma:  membind -> preferred-many / preferred -> CPUs only (first touch) -> nothing

Pure: what the host permits comes in as ``BindingTools``, read once by ``launch.installed.binding_tools``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from launch.model.errors import PlanError
from launch.model.idset import IdSet, format_ids
from launch.model.plan import MemPolicy
from launch.model.settings import PlanSettings
from launch.plan_host.host_memory import RankMemory
from launch.plan_host.placement import Placement, say_by_rank

BindMethod = Literal["numactl", "libnuma", "none"]

LADDER: tuple[MemPolicy, ...] = ("bind", "preferred-many", "preferred")
SYS_NICE_HINT = "in a container try --cap-add SYS_NICE"
_WIDER = " (a wider cpuset may have it)"


@dataclass(frozen=True)
class BindingTools:
    """What binds on this host, as found by running it. ``policies`` are those that were granted."""

    numactl: bool = True
    libnuma: bool = True
    cpus: bool = True
    policies: frozenset[MemPolicy] = frozenset(LADDER)
    why: str = ""
    """The refusal that was met, in the tool's own words."""


@dataclass(frozen=True)
class Ladder:
    """What this host's ranks may use, best first."""

    method: BindMethod
    policies: tuple[MemPolicy, ...]
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Binding:
    """How one rank is bound; empty ``cpus``: not at all."""

    method: BindMethod
    cpus: IdSet = frozenset()
    policy: MemPolicy = "none"
    mem_nodes: IdSet = frozenset()

    @property
    def argv(self) -> tuple[str, ...]:
        """What goes in front of the rank's command; ``--cpunodebind`` would fail on a node without memory."""
        if self.method != "numactl" or not self.cpus:
            return ()
        options = {"bind": "--membind", "preferred": "--preferred", "preferred-many": "--preferred-many"}
        memory = (f"{options[self.policy]}={format_ids(self.mem_nodes)}",) if self.policy != "none" else ()
        return ("numactl", f"--physcpubind={format_ids(self.cpus)}", *memory)


def choose_ladder(settings: PlanSettings, tools: BindingTools) -> Ladder:
    """Decide the method and the memory policies that ranks of this host may use.

    Raises:
        PlanError: If what was asked for by name is not to be had, or ``--numa strict`` cannot bind memory.
    """
    if settings.numa == "off":
        return Ladder("none", ())
    method = _choose_method(settings, tools)
    if method == "none":
        return _step_down(settings, Ladder("none", ()), f"ranks are not bound: {_no_method(tools)}")
    if settings.mem_policy == "none":
        return Ladder(method, ())
    granted = tuple(policy for policy in _wanted(settings) if policy in tools.policies)
    if not granted:
        if settings.mem_policy != "auto":
            raise PlanError(
                f"--mem-policy {settings.mem_policy} is refused here ({_refusal(tools)}); {SYS_NICE_HINT}, "
                "or --mem-policy auto"
            )
        why = f"memory is not bound, CPUs only: {_refusal(tools)}; {SYS_NICE_HINT}"
        return _step_down(settings, Ladder(method, ()), why)
    if settings.mem_policy == "auto" and granted[0] != "bind":
        why = f"memory is {granted[0]} instead of bound: {_refusal(tools)}; {SYS_NICE_HINT}"
        return _step_down(settings, Ladder(method, granted), why)
    return Ladder(method, granted)


def bind_ranks(
    ladder: Ladder, settings: PlanSettings, placements: Sequence[Placement], memories: Sequence[RankMemory]
) -> tuple[tuple[Binding, ...], tuple[str, ...]]:
    """Bind every rank of a host as far as the ladder and its own placement reach.

    Returns:
        The bindings in order of local rank, and warnings.

    Raises:
        PlanError: If ``--numa strict`` is set and a rank would be less than bound, or bound to another node.
    """
    bindings, said = [], []
    for placement, memory in zip(placements, memories, strict=True):
        binding, why = _bind_rank(ladder, settings, placement, memory)
        bindings.append(binding)
        if settings.numa == "strict" and (reason := why or _doubt_node(placement, binding)):
            raise PlanError(f"--numa strict: rank {placement.local_rank}: {reason}; try --numa auto")
        # Why a rank has no CPUs at all has been said where it was placed.
        said.append((placement.local_rank, why if binding.cpus else None))
    return tuple(bindings), (*ladder.warnings, *say_by_rank(said))


def _bind_rank(
    ladder: Ladder, settings: PlanSettings, placement: Placement, memory: RankMemory
) -> tuple[Binding, str | None]:
    if ladder.method == "none":
        return Binding("none"), None
    if not placement.cpus:
        return Binding("none"), "it is not bound, for no CPUs are known for it"
    unbound_memory = Binding(ladder.method, placement.cpus)
    if not memory.mem_nodes or not ladder.policies:
        missing = ladder.policies and not memory.mem_nodes
        return unbound_memory, "it is bound to CPUs only, for it has no memory node" if missing else None
    if ladder.policies[0] == "bind" and settings.mem_policy == "auto" and not memory.fits:
        return _prefer(ladder, placement, memory), (
            f"memory of node {format_ids(memory.mem_nodes)} is preferred, not bound: the limit of "
            f"{memory.limit_mb} MiB may not fit there, and a bound rank would be killed"
        )
    if ladder.policies[0] == "bind":
        return Binding(ladder.method, placement.cpus, "bind", memory.mem_nodes), None
    return _prefer(ladder, placement, memory), None


def _doubt_node(placement: Placement, binding: Binding) -> str | None:
    """Say what of a rank is on another node than its own; CPUs that the kernel sees beside a GPU count."""
    gpu, own = placement.gpu, format_ids(placement.numa_nodes)
    if gpu and gpu.numa_node is not None and gpu.numa_node not in placement.numa_nodes:
        if not gpu.cpus & placement.cpus:
            return f"found CPUs of node {own}, needed some of node {gpu.numa_node} of its GPU{_WIDER}"
    if not binding.mem_nodes <= placement.numa_nodes:
        return f"found memory of node {format_ids(binding.mem_nodes)}, needed that of node {own}{_WIDER}"
    return None


def _prefer(ladder: Ladder, placement: Placement, memory: RankMemory) -> Binding:
    """``preferred`` takes one node; several need ``preferred-many`` (Linux 5.15), else its own serves."""
    nodes = memory.mem_nodes
    if "preferred-many" in ladder.policies and (len(nodes) > 1 or "preferred" not in ladder.policies):
        return Binding(ladder.method, placement.cpus, "preferred-many", nodes)
    if "preferred" not in ladder.policies:
        return Binding(ladder.method, placement.cpus)
    own = min(sorted(nodes), key=lambda node: node != placement.numa_node)
    return Binding(ladder.method, placement.cpus, "preferred", frozenset({own}))


def _wanted(settings: PlanSettings) -> tuple[MemPolicy, ...]:
    named: dict[str, tuple[MemPolicy, ...]] = {
        "bind": ("bind",),
        "preferred": ("preferred-many", "preferred"),
    }
    return named.get(settings.mem_policy, LADDER)


def _choose_method(settings: PlanSettings, tools: BindingTools) -> BindMethod:
    here = {"numactl": tools.numactl and tools.cpus, "libnuma": tools.libnuma}
    if settings.bind_method != "auto":
        if not here[settings.bind_method]:
            other = next((name for name, works in here.items() if works), None)
            raise PlanError(
                f"--bind-method {settings.bind_method} does not work here ({_missing(settings, tools)}); "
                f"try {f'--bind-method {other}' if other else '--numa off'}"
            )
        return settings.bind_method
    return "numactl" if here["numactl"] else "libnuma" if here["libnuma"] else "none"


def _missing(settings: PlanSettings, tools: BindingTools) -> str:
    """Why the method that was asked for by name is not to be had, whatever else is here."""
    if settings.bind_method == "libnuma":
        return "libnuma.so.1 cannot be loaded; install libnuma1"
    return _no_method(tools) if tools.numactl or not tools.libnuma else "numactl is not in PATH; install it"


def _no_method(tools: BindingTools) -> str:
    if tools.why:
        return tools.why
    return (
        "neither numactl nor libnuma is here; install numactl"
        if not tools.numactl
        else "numactl cannot bind CPUs"
    )


def _refusal(tools: BindingTools) -> str:
    return tools.why or "the kernel does not grant it"


def _step_down(settings: PlanSettings, ladder: Ladder, why: str) -> Ladder:
    if settings.numa == "strict":
        raise PlanError(f"--numa strict: {why}; or try --numa auto")
    return Ladder(ladder.method, ladder.policies, (why,))
