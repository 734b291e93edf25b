"""What the hosts' answers mean for a job: what is wrong where, and what a person should know. Pure."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from launch.model.errors import PlanError
from launch.model.topology import Gpu, Machine
from launch.plan_host.placement import allowed_cores
from launch.preflight.report import PACKAGES, HostReport

_GIB = 1 << 30


@dataclass(frozen=True)
class Demand:
    """What a job wants of its hosts."""

    gpus_of: Callable[[Machine], Sequence[Gpu]]
    """The GPUs that a machine gives to the job; raises PlanError when one that is named is not there."""
    ranks: Mapping[str, int] = field(default_factory=dict)
    """Host -> ranks that will run there."""
    oversubscribe: bool = False
    in_allocation: bool = False
    """A batch system counts slots as its site wants; more ranks than cores are said, not refused."""
    allotted_gpus: Mapping[str, int] = field(default_factory=dict)
    """Host -> GPUs that the batch system gave."""
    needs_own_name: bool = False
    """Whether ranks look up their own host's name (Gloo)."""


@dataclass(frozen=True)
class Verdict:
    """``troubles``: (host, what is wrong) for all that stands in the way of the job."""

    troubles: tuple[tuple[str, str], ...]
    warnings: tuple[str, ...]


def judge_hosts(
    reports: Sequence[HostReport], versions: Mapping[str, str | None], versions_of: str, demand: Demand
) -> Verdict:
    """Hold the answers against the job.

    Args:
        reports: One a host.
        versions: What all hosts should have.
        versions_of: Whose versions these are, for messages.
        demand: What the job wants.
    """
    troubles: list[tuple[str, str]] = []
    warnings: list[tuple[str, str]] = []
    for report in reports:
        troubles += [(report.host, text) for text in _find_troubles(report, versions, versions_of, demand)]
        warnings += [(report.host, text) for text in _find_warnings(report, demand)]
    said = [f"{hosts}: {text}" for hosts, text in _by_text(warnings)]
    return Verdict(tuple(troubles), (*_say_differences(reports), *said))


def render_table(troubles: Sequence[tuple[str, str]]) -> list[str]:
    """Render what is wrong where, one line for all hosts where it is; empty when nothing is."""
    rows = _by_text(troubles)
    width = max((len(hosts) for hosts, _ in rows), default=0)
    return [f"{hosts:<{width}}  {text}" for hosts, text in rows]


def describe_machine(machine: Machine) -> str:
    """Describe a machine in a few words: ``44 cores, 2 NUMA nodes, 512 GiB, 6 x Tesla V100``."""
    dram = [node for node in machine.numa_nodes if node.kind != "gpu"]
    names = [gpu.name or "GPU" for gpu in machine.gpus]
    sizes = [node.memory_bytes for node in dram]
    # Two digits: hosts of one kind differ by some MiB.
    memory = f"{float(f'{sum(filter(None, sizes)) / _GIB:.2g}'):g} GiB" if any(sizes) else "memory unknown"
    gpus = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names)) or "no GPU"
    cores = len(allowed_cores(machine))
    return f"{_count(cores, 'core')}, {_count(len(dram), 'NUMA node')}, {memory}, {gpus}"


def _find_troubles(
    report: HostReport, versions: Mapping[str, str | None], versions_of: str, demand: Demand
) -> Iterator[str]:
    if report.trouble is not None or report.machine is None:
        yield report.trouble or "nothing is known of it"
        return
    for name in PACKAGES:
        wanted, there = versions.get(name), report.versions.get(name)
        if there != wanted:
            yield f"{_version(name, there)}; {versions_of} has {_version(name, wanted)}"
    if demand.needs_own_name and report.finds_itself is False:
        yield (
            f"its own name {report.names[-1] if report.names else ''!r} leads to no address, "
            "which ends Horovod's Gloo with a segmentation fault; add it to /etc/hosts there"
        )
    try:
        crowded = _say_crowding(report.host, report.machine, demand)
    except PlanError as error:
        yield str(error)
        return
    if crowded and not demand.in_allocation:
        yield f"{crowded}; give it fewer, or --oversubscribe"


def _find_warnings(report: HostReport, demand: Demand) -> Iterator[str]:
    machine, busy = report.machine, report.occupancy
    if report.trouble is not None or machine is None:
        return
    try:
        gpus = demand.gpus_of(machine)
    except PlanError:
        return
    crowded = _say_crowding(report.host, machine, demand)
    if crowded and demand.in_allocation:
        yield crowded
    allotted = demand.allotted_gpus.get(report.host)
    if allotted is not None and len(machine.gpus) < allotted:
        yield f"{_count(allotted, 'GPU')} allotted, but {len(machine.gpus)} can be seen there"
    wanted = {gpu.pci_bus_id for gpu in gpus[: demand.ranks.get(report.host, len(gpus))]}
    for use in busy.gpus:
        if use.pci_bus_id in wanted:
            by = f", by {_count(use.processes, 'process', 'es')}" if use.processes else ""
            yield f"GPU {use.pci_bus_id} is in use: {use.used_bytes / _GIB:.1f} GiB of its memory{by}"
    if busy.jobs:
        yield f"lmsrun already runs there: {_count(busy.jobs, 'job')} with {_count(busy.ranks, 'rank')}"
    elif busy.load is not None and busy.load >= max(1.0, len(machine.cores) / 2):
        yield f"something else runs there: a load of {busy.load:.1f} on {_count(len(machine.cores), 'core')}"


def _say_crowding(host: str, machine: Machine, demand: Demand) -> str | None:
    """More ranks than the host has GPUs or cores for, unless that is wanted."""
    gpus, ranks = demand.gpus_of(machine), demand.ranks.get(host, 0)
    slots = len(gpus) or len(allowed_cores(machine))
    if demand.oversubscribe or ranks <= slots:
        return None
    return f"{_count(ranks, 'rank')} for {_count(slots, 'GPU' if gpus else 'usable core')}"


def _say_differences(reports: Sequence[HostReport]) -> list[str]:
    """Which hosts are of which kind, when there are several kinds."""
    kinds: dict[str, list[str]] = {}
    for report in reports:
        if report.machine is not None:
            kinds.setdefault(describe_machine(report.machine), []).append(report.host)
    if len(kinds) < 2:
        return []
    said = "; ".join(f"{_some(hosts)}: {kind}" for kind, hosts in kinds.items())
    return [f"hosts differ, and each is planned as it is ({said})"]


def _by_text(said: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    hosts_of: dict[str, list[str]] = {}
    for host, text in said:
        hosts_of.setdefault(text, []).append(host)
    return [(_some(hosts), text) for text, hosts in hosts_of.items()]


def _some(hosts: Sequence[str]) -> str:
    return ", ".join(hosts[:4]) + (f" and {len(hosts) - 4} more" if len(hosts) > 4 else "")


def _version(name: str, version: str | None) -> str:
    return f"{name} {version}" if version else f"no {name}"


def _count(number: int, what: str, plural: str = "s") -> str:
    return f"{number} {what}{plural * (number != 1)}"
