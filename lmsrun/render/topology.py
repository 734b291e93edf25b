"""A machine as a tree for people."""

from collections import Counter
from dataclasses import dataclass, field

from launch.model.idset import format_ids
from launch.model.text import name_ids, printable
from launch.model.topology import Gpu, Machine, NumaNode, Package

_PLAIN = str.maketrans("└├─│", "`|-|")
_KINDS = {"dram": "", "gpu": " (a GPU's memory)", "memory-only": " (memory only)"}


@dataclass
class _Branch:
    text: str
    below: "list[_Branch]" = field(default_factory=list)


def render_tree(machine: Machine, *, plain: bool = False, is_here: bool = True) -> str:
    """Draw packages, their NUMA nodes and the GPUs on these, then what belongs nowhere, then the limits.

    Plain text: it needs no package and reads the same in a terminal, a log and a mail, if ``plain`` in ASCII.
    ``is_here`` is False for a saved machine, whose limits are not those of this process.
    """
    lines = [f"{machine.source}: {machine.architecture}, {describe_counts(machine)}"]
    nodes_of: dict[int | None, list[_Branch]] = {}
    cores_of = Counter(core.numa_node for core in machine.cores)
    for node in machine.numa_nodes:
        nodes_of.setdefault(node.package, []).append(_numa_node(node, cores_of[node.id], machine))
    branches = [_package(package, nodes_of.get(package.id, [])) for package in machine.packages]
    branches += nodes_of.get(None, [])
    branches += [_Branch(_gpu_text(gpu)) for gpu in machine.gpus if gpu.numa_node is None]
    branches.append(_Branch(_allowed(machine, is_here)))
    if limits := _limits(machine):
        branches.append(_Branch(limits))
    lines += _draw(branches)
    lines += [f"warning: {warning}" for warning in machine.warnings]
    text = "\n".join(map(printable, lines))
    return text.translate(_PLAIN) if plain else text


def describe_counts(machine: Machine) -> str:
    """Say in one line how many parts of each kind a machine has."""
    cpus = sum(len(core.cpus) for core in machine.cores)
    counted = (
        (len(machine.packages), "socket"),
        (len(machine.numa_nodes), "NUMA node"),
        (len(machine.cores), "core"),
        (cpus, "CPU"),
        (len(machine.gpus), "GPU"),
    )
    return ", ".join(f"{count} {what}{'' if count == 1 else 's'}" for count, what in counted)


def _package(package: Package, nodes: list[_Branch]) -> _Branch:
    return _Branch(f"socket {package.id}: CPUs {format_ids(package.cpus)}", nodes)


def _numa_node(node: NumaNode, cores: int, machine: Machine) -> _Branch:
    cpus = f"CPUs {format_ids(node.cpus)} ({cores} core{'' if cores == 1 else 's'}), " if node.cpus else ""
    return _Branch(
        f"NUMA node {node.id}: {cpus}{format_size(node.memory_bytes)}{_KINDS[node.kind]}",
        [_Branch(_gpu_text(gpu)) for gpu in machine.gpus if gpu.numa_node == node.id],
    )


def _gpu_text(gpu: Gpu) -> str:
    known = filter(None, (gpu.name or gpu.vendor, format_size(gpu.memory_bytes), gpu.uuid))
    where = "" if gpu.numa_node is not None else ", NUMA node unknown"
    near = f", near CPUs {format_ids(gpu.cpus)}" if gpu.cpus and where else ""
    return f"GPU {gpu.index}: {gpu.address}, {', '.join(known)}{where}{near}"


def _allowed(machine: Machine, is_here: bool) -> str:
    cpus = name_ids("CPU", format_ids(machine.allowed.cpus))
    nodes = name_ids("NUMA node", format_ids(machine.allowed.mems))
    return f"{'this process' if is_here else 'a job there'} may use {cpus} and memory of {nodes}"


def _limits(machine: Machine) -> str:
    limits = machine.limits
    told = []
    if limits.memory_bytes is not None:
        told.append(f"{format_size(limits.memory_bytes)} by its cgroup")
    if limits.cpu_millis is not None:
        told.append(f"the time of {limits.cpu_millis / 1000:g} CPUs by its cgroup")
    if limits.memlock_bytes is not None:
        told.append(f"{format_size(limits.memlock_bytes)} of locked memory")
    if limits.set_mempolicy is False:
        told.append("no memory policy may be set")
    return "limits: " + ", ".join(told) if told else ""


def format_size(size_bytes: int | None) -> str:
    """Bytes for people, such as ``15.8 GiB``."""
    if size_bytes is None:
        return "memory unknown"
    for unit, bits in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size_bytes >= 1 << bits:
            return f"{size_bytes / (1 << bits):.1f} {unit}"
    return "no memory" if size_bytes == 0 else f"{size_bytes} bytes"


def _draw(branches: list[_Branch], indent: str = "") -> list[str]:
    lines = []
    for position, branch in enumerate(branches):
        last = position == len(branches) - 1
        lines.append(f"{indent}{'└── ' if last else '├── '}{branch.text}")
        lines += _draw(branch.below, indent + ("    " if last else "│   "))
    return lines
