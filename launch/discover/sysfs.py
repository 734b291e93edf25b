"""CPUs, cores, packages and NUMA nodes as the kernel's ``sys/`` and ``proc/`` show them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from launch.discover.tree import Tree
from launch.model.errors import TopologyError, TopologyLimitError
from launch.model.idset import IdParser, IdSet, format_ids
from launch.model.topology import MAX_NUMA_NODES, Allowed, Core, MemoryKind, NumaNode, Package

CPU = "sys/devices/system/cpu"
NODE = "sys/devices/system/node"


@dataclass(frozen=True)
class Hardware:
    """The part of a machine that has nothing to do with GPUs."""

    packages: tuple[Package, ...]
    numa_nodes: tuple[NumaNode, ...]
    cores: tuple[Core, ...]
    warnings: tuple[str, ...]

    @cached_property
    def online(self) -> IdSet:
        """Every online PU."""
        return frozenset().union(*(core.cpus for core in self.cores))

    @cached_property
    def node_of(self) -> Mapping[int, NumaNode]:
        """The node of every PU that is on one."""
        return {cpu: node for node in self.numa_nodes for cpu in node.cpus}


def read_hardware(tree: Tree, gpu_memory: Iterable[int] = ()) -> Hardware:
    """Read CPUs and memory.

    Args:
        tree: Where ``proc/`` and ``sys/`` are.
        gpu_memory: Ids of NUMA nodes that are known to be memory of a GPU.

    Raises:
        TopologyError: If the tree names no online CPU.
    """
    online = read_online(tree)
    warnings: list[str] = []
    node_cpus = _read_node_cpus(tree, online)
    if not node_cpus:
        warnings.append("the kernel shows no NUMA nodes: taken as one node 0")
        node_cpus = {0: online}
    if shared := take_shared_cpus_once(node_cpus):
        warnings.append(
            f"CPUs {format_ids(shared)} are on several NUMA nodes: taken as on the one with the lowest number"
        )
    stray = online - frozenset().union(*node_cpus.values())
    if stray:
        warnings.append(f"CPUs {format_ids(stray)} are on no NUMA node")
    package_of, siblings = _read_cores(tree, online)
    cores = build_cores(siblings, package_of, node_cpus)
    numa_nodes = tuple(
        _read_numa_node(tree, numa_node, cpus, package_of, frozenset(gpu_memory), set(node_cpus))
        for numa_node, cpus in sorted(node_cpus.items())
    )
    return Hardware(build_packages(package_of, numa_nodes), numa_nodes, cores, tuple(warnings))


def read_online(tree: Tree) -> IdSet:
    """Read the online PUs.

    Raises:
        TopologyError: If there is none, or the list is damaged.
    """
    listed = read_ids(tree, f"{CPU}/online")
    if listed:
        return listed
    # Kernels without CPU hot-plug have no such file.
    found = _numbered(tree.names(CPU), "cpu")
    online = frozenset(cpu for cpu in found if tree.read(f"{CPU}/cpu{cpu}/online") != "0")
    if not online:
        raise TopologyError(
            f"no online CPU in {CPU}; needed a tree with the proc/ and sys/ of a Linux machine"
        )
    return online


def read_ids(tree: Tree, path: str) -> IdSet | None:
    """Read an id list from a file; None when it is absent.

    Raises:
        TopologyError: If the file holds no id list.
    """
    text = tree.read(path)
    try:
        return None if text is None else tree.parser.ids(text)
    except ValueError as error:
        raise TopologyError(f"{path}: {error}") from error


def _read_mask(tree: Tree, path: str) -> IdSet | None:
    text = tree.read(path)
    try:
        return None if text is None else tree.parser.mask(text)
    except ValueError as error:
        raise TopologyError(f"{path}: {error}") from error


def read_ids_or_mask(tree: Tree, list_path: str, mask_path: str) -> IdSet | None:
    """Read the ids of a list file, else of the mask file that older kernels and archives have instead."""
    listed = read_ids(tree, list_path)
    return _read_mask(tree, mask_path) if listed is None else listed


def _read_int(tree: Tree, path: str) -> int | None:
    text = tree.read(path)
    try:
        return None if text is None else int(text)
    except ValueError:
        return None


def _numbered(names: Iterable[str], prefix: str) -> list[int]:
    """List the numbers of entries such as ``cpu12``, leaving out ``cpufreq`` and its like."""
    tails = (name.removeprefix(prefix) for name in names if name.startswith(prefix))
    return sorted(int(tail) for tail in tails if tail.isascii() and tail.isdigit() and len(tail) < 7)


def _read_node_cpus(tree: Tree, online: IdSet) -> dict[int, IdSet]:
    """Online PUs by NUMA node; a node's list may name offline ones as well."""
    listed = read_ids(tree, f"{NODE}/online")
    present = set(_numbered(tree.names(NODE), "node"))
    numa_nodes = sorted(present if listed is None else present & listed)
    limit_numa_nodes(len(numa_nodes))
    return {
        numa_node: online
        & (
            read_ids_or_mask(tree, f"{NODE}/node{numa_node}/cpulist", f"{NODE}/node{numa_node}/cpumap")
            or frozenset()
        )
        for numa_node in numa_nodes
    }


def take_shared_cpus_once(node_cpus: dict[int, IdSet]) -> IdSet:
    """Leave CPUs to the lowest of the nodes that name them; returns those that several named."""
    taken: set[int] = set()
    shared: set[int] = set()
    for node in sorted(node_cpus):
        shared |= node_cpus[node] & taken
        node_cpus[node] -= taken
        taken |= node_cpus[node]
    return frozenset(shared)


def limit_numa_nodes(count: int) -> None:
    """Refuse more nodes than a kernel knows: what is done with them takes the square of their number.

    Raises:
        TopologyError: If there are more.
    """
    if count > MAX_NUMA_NODES:
        raise TopologyLimitError(f"{count} NUMA nodes; needed {MAX_NUMA_NODES} at most")


def _read_cores(tree: Tree, online: IdSet) -> tuple[dict[int, int | None], list[IdSet]]:
    """Read the package of every PU, and the online PUs of every core.

    Only the first PU of a core is asked, which halves (SMT2) or cuts to an eighth (SMT8) the files to open.
    """
    package_of: dict[int, int | None] = {}
    cores: list[IdSet] = []
    for cpu in sorted(online):
        if cpu in package_of:
            continue
        at = f"{CPU}/cpu{cpu}/topology"
        listed = read_ids_or_mask(tree, f"{at}/thread_siblings_list", f"{at}/thread_siblings")
        siblings = frozenset({cpu}) | frozenset(
            pu for pu in (listed or frozenset()) & online if pu not in package_of
        )
        package = _read_int(tree, f"{at}/physical_package_id")
        # Some ARM and virtual machines have -1 there: unknown, not a package of that number.
        package_of.update(dict.fromkeys(siblings, package if package is not None and package >= 0 else None))
        cores.append(siblings)
    return package_of, cores


def build_cores(
    siblings: Iterable[IdSet], package_of: Mapping[int, int | None], node_cpus: Mapping[int, IdSet]
) -> tuple[Core, ...]:
    """Cores with their place; a core whose PUs lie on several NUMA nodes has none."""
    node_of = {cpu: numa_node for numa_node, cpus in node_cpus.items() for cpu in cpus}
    return tuple(
        Core(
            package=only(package_of.get(cpu) for cpu in cpus),
            numa_node=only(node_of.get(cpu) for cpu in cpus),
            cpus=cpus,
        )
        for cpus in sorted(siblings, key=min)
    )


def build_packages(
    package_of: Mapping[int, int | None], numa_nodes: Iterable[NumaNode]
) -> tuple[Package, ...]:
    """Build packages from the package of every PU, each with the NUMA nodes whose CPUs it holds."""
    cpus: dict[int, set[int]] = {}
    for cpu, package in package_of.items():
        if package is not None:
            cpus.setdefault(package, set()).add(cpu)
    nodes_of: dict[int | None, list[int]] = {}
    for node in numa_nodes:
        for package in {package_of.get(cpu) for cpu in node.cpus}:
            nodes_of.setdefault(package, []).append(node.id)
    return tuple(
        Package(id=package, cpus=frozenset(pus), numa_nodes=tuple(nodes_of.get(package, ())))
        for package, pus in sorted(cpus.items())
    )


def only(values: Iterable[int | None]) -> int | None:
    """Return the one value that all share, else None."""
    distinct = set(values)
    return distinct.pop() if len(distinct) == 1 else None


def _read_numa_node(
    tree: Tree,
    numa_node: int,
    cpus: IdSet,
    package_of: Mapping[int, int | None],
    gpu_memory: IdSet,
    all_nodes: set[int],
) -> NumaNode:
    return NumaNode(
        id=numa_node,
        package=only(package_of.get(cpu) for cpu in cpus),
        cpus=cpus,
        memory_bytes=_read_memory_bytes(tree, numa_node, all_nodes),
        kind=kind_of(cpus, numa_node in gpu_memory),
        distances=_read_distances(tree, numa_node, sorted(all_nodes)),
    )


def kind_of(cpus: IdSet, of_gpu: bool) -> MemoryKind:
    """Tell what a node's memory is; a node with CPUs holds host memory whatever else is said of it."""
    if cpus:
        return "dram"
    return "gpu" if of_gpu else "memory-only"


def _read_memory_bytes(tree: Tree, numa_node: int, all_nodes: set[int]) -> int | None:
    """Read a node's memory; the only node has all that the machine tells of.

    Seen on a virtual machine whose memory grows as it is used: 15 GiB in its one node's ``meminfo``, 125 in
    ``/proc/meminfo``.
    """
    files = [f"{NODE}/node{numa_node}/meminfo", *(["proc/meminfo"] if len(all_nodes) == 1 else [])]
    found = [_total_bytes(tree.read(path) or "", numa_node) for path in files]
    return max((total for total in found if total is not None), default=None)


def _total_bytes(text: str, numa_node: int) -> int | None:
    for line in text.splitlines():
        head, _, tail = line.partition("MemTotal:")
        words = tail.split()
        if words and words[0].isdecimal() and head.strip() in ("", f"Node {numa_node}"):
            return int(words[0]) * 1024
    return None


def _read_distances(tree: Tree, numa_node: int, all_nodes: list[int]) -> tuple[tuple[int, int], ...]:
    """Read a node's distances: the kernel prints one per online node, in ascending id, itself included."""
    words = (tree.read(f"{NODE}/node{numa_node}/distance") or "").split()
    if len(words) != len(all_nodes) or not all(word.isdecimal() for word in words):
        return ()
    return tuple((other, int(word)) for other, word in zip(all_nodes, words, strict=True))


def read_allowed(tree: Tree, hardware: Hardware, cgroup_ids: Mapping[str, IdSet | None]) -> Allowed:
    """Read what a process there may use: affinity and cpuset, restricted to online PUs and host memory.

    Args:
        tree: Where ``proc/self/status`` is; a saved tree may lack it.
        hardware: The machine.
        cgroup_ids: ``cpus`` and ``mems`` of the cpuset, for trees without ``proc/self/status``.

    Nodes without memory, GPUs' memory and memory-only nodes are never in ``mems``: a host-memory mask is
    made of it.
    """
    status = _fields(tree.read("proc/self/status") or "")
    host = host_memory_nodes(hardware.numa_nodes)
    cpus = _ids_of(tree.parser, status, "Cpus_allowed_list", cgroup_ids.get("cpus"))
    mems = _ids_of(tree.parser, status, "Mems_allowed_list", cgroup_ids.get("mems"))
    return Allowed(
        cpus=hardware.online if cpus is None else hardware.online & cpus,
        mems=host if mems is None else host & mems,
    )


def host_memory_nodes(numa_nodes: Iterable[NumaNode]) -> IdSet:
    """Find the nodes that have host memory, as far as is known."""
    return frozenset(node.id for node in numa_nodes if node.kind == "dram" and node.memory_bytes != 0)


def _fields(text: str) -> dict[str, str]:
    return {key: value.strip() for key, _, value in (line.partition(":") for line in text.splitlines())}


def _ids_of(parser: IdParser, status: Mapping[str, str], key: str, otherwise: IdSet | None) -> IdSet | None:
    if key not in status:
        return otherwise
    try:
        return parser.ids(status[key])
    except ValueError as error:
        raise TopologyError(f"proc/self/status: {key}: {error}") from error
