"""Machines and placements held against hwloc's own tools, which read the same sources independently.

``HWLOC_ARCHIVES`` names a folder with more of them, such as ``tests/hwloc/linux`` of hwloc's sources.
"""

import os
import shutil
import subprocess
import tarfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import pytest

from launch.discover import read_machine
from launch.discover.gpus import parse_pci_address
from launch.model.errors import TopologyError
from launch.model.idset import IdSet, format_ids, parse_mask
from launch.model.settings import PlanSettings
from launch.model.topology import Machine
from launch.plan_host.cpu_choice import narrow_machine
from launch.plan_host.placement import Placement, allowed_cores, place_ranks

SYNTHETIC = (
    "pack:1 numa:1 core:2 pu:1",
    "pack:2 numa:1 core:4 pu:2",
    "pack:2 numa:4 core:6 pu:2",
    "pack:1 numa:4 core:16 pu:1",
    "pack:4 numa:1 core:3 pu:4",
    "pack:2 numa:1 core:11 pu:8",
    "pack:8 numa:1 core:7 pu:1",
)
MORE = Path(os.environ.get("HWLOC_ARCHIVES") or "/nonexistent")
TOOLS = ("lstopo-no-graphics", "hwloc-calc", "hwloc-distrib")
pytestmark = pytest.mark.skipif(
    not all(map(shutil.which, TOOLS)), reason=f"needs {', '.join(TOOLS)} (Debian's hwloc-nox)"
)


@dataclass(frozen=True)
class Oracle:
    """A machine as hwloc tells it. ``source`` is its own XML."""

    source: Path
    online: IdSet
    cores: frozenset[IdSet]
    nodes: dict[int, IdSet]
    pci: dict[str, IdSet]
    """PCI address -> CPUs of the object that it hangs on."""


def run(*argv: object) -> str:
    done = subprocess.run(
        [str(word) for word in argv], capture_output=True, text=True, timeout=300, check=True
    )
    return done.stdout.strip()


def ask_lstopo(source: object, folder: Path) -> Oracle:
    out = folder / "oracle.xml"
    argv = ("lstopo-no-graphics", "--input", source, "--disallowed", "--whole-io", "--of", "xml", "-f", out)
    try:
        run(*argv)
        root = ElementTree.parse(out).getroot()  # noqa: S314 - written by hwloc just now
    except (subprocess.CalledProcessError, ElementTree.ParseError) as error:
        pytest.skip(f"this hwloc cannot read it: {getattr(error, 'stderr', error)}")
    found = Oracle(out, frozenset(), frozenset(), {}, {})
    cores = set()

    def walk(element: ElementTree.Element, around: IdSet) -> None:
        kind = element.get("type")
        cpus = parse_mask(text) if (text := element.get("cpuset")) else around
        if kind == "Core":
            cores.add(cpus)
        if kind == "NUMANode" and cpus:
            found.nodes[int(element.get("os_index", "0"))] = cpus
        if kind == "PCIDev" and (address := parse_pci_address(element.get("pci_busid", ""))):
            found.pci[address] = around
        for child in element.findall("object"):
            walk(child, cpus)

    for machine in root.findall("object"):
        walk(machine, frozenset())
        online = parse_mask(machine.get("cpuset", "0"))
    return Oracle(out, online, frozenset(cores), found.nodes, found.pci)


def as_mask(cpus: IdSet) -> str:
    """A set of CPUs as hwloc reads it: 32-bit words, high to low."""
    number = sum(1 << cpu for cpu in cpus)
    words = []
    while number:
        words.append(f"0x{number & 0xFFFFFFFF:08x}")
        number >>= 32
    return ",".join(reversed(words)) or "0x0"


def nodes_of(oracle: Oracle, cpus: IdSet) -> IdSet:
    """The NUMA nodes that CPUs lie on, as hwloc-calc computes it."""
    said = run(
        "hwloc-calc", "--input", oracle.source, "--disallowed", "--po", "-I", "numanode", as_mask(cpus)
    )
    return frozenset(int(word) for word in said.split(",") if word)


def compare_machine(machine: Machine, oracle: Oracle, strict: bool) -> None:
    """The same CPUs, cores, nodes, and the same place of every GPU.

    Where it is not ``strict``, hwloc may know better than the kernel's files: that two cores of an AMD module
    are two, and near which CPUs memory without CPUs lies.
    """
    ours = {core.cpus for core in machine.cores}
    nodes = {node.id: node.cpus for node in machine.numa_nodes if node.cpus}
    assert frozenset().union(*ours) == oracle.online
    if strict:
        assert ours == oracle.cores
    assert all(any(core <= own for own in ours) for core in oracle.cores)
    assert nodes.items() <= oracle.nodes.items()
    for gpu in machine.gpus:
        around = oracle.pci.get(gpu.pci_bus_id)
        if around and around < oracle.online and gpu.numa_node is not None:
            assert oracle.nodes[gpu.numa_node] & around, f"GPU {gpu.pci_bus_id}"


def compare_ranks(machine: Machine, oracle: Oracle, ranks: tuple[Placement, ...]) -> None:
    """Whole cores, on the nodes that the plan names, and none twice."""
    allowed = machine.allowed.cpus
    cores = [core & allowed for core in oracle.cores or ({cpu} for cpu in oracle.online) if core & allowed]
    for rank in ranks:
        mine = [core for core in cores if core & rank.cpus]
        assert frozenset().union(*mine) == rank.cpus
        near = nodes_of(oracle, rank.cpus)
        with_cpus = frozenset(node.id for node in machine.numa_nodes if node.cpus)
        assert near & with_cpus == rank.numa_nodes, format_ids(rank.cpus)
    if len(ranks) <= len(cores):
        assert sum(len(rank.cpus) for rank in ranks) == len(frozenset().union(*(rank.cpus for rank in ranks)))


def compare_spread(machine: Machine, oracle: Oracle, ranks: tuple[Placement, ...]) -> None:
    """On a machine of equal nodes, as many ranks on each as hwloc-distrib puts there."""
    sizes = {len(cpus) for cpus in oracle.nodes.values()}
    if len(sizes) != 1 or len(ranks) % len(oracle.nodes) or machine.allowed.cpus != oracle.online:
        return
    told = run("hwloc-distrib", "--input", oracle.source, len(ranks)).split()
    theirs = Counter(node for mask in told for node in nodes_of(oracle, parse_hwloc_mask(mask)))
    assert Counter(rank.numa_node for rank in ranks) == theirs


def parse_hwloc_mask(mask: str) -> IdSet:
    """Read a mask in which words of zeros are empty."""
    return parse_mask(",".join(word or "0" for word in mask.split(",")))


def compare_all(source: object, folder: Path, strict: bool = True) -> Machine:
    root: object = source
    if str(source).endswith((".bz2", ".gz", ".xz")):
        with tarfile.open(str(source)) as archive:
            archive.extractall(folder / "tree", filter="data")
        root = next((folder / "tree").glob("*/sys")).parent
    oracle = ask_lstopo(root, folder)
    machine = read_machine(str(source if Path(str(source)).is_file() else oracle.source))
    if any("several NUMA nodes" in said for said in machine.warnings):
        pytest.skip("its nodes contradict each other")
    compare_machine(machine, oracle, strict)
    if not oracle.nodes or any(core.numa_node is None for core in machine.cores):
        return machine
    slots = len(allowed_cores(machine))
    for count in sorted({1, 3, len(oracle.nodes), 2 * len(oracle.nodes)}):
        if count <= slots:
            ranks = place_ranks(machine, (), count).ranks
            compare_ranks(machine, oracle, ranks)
            if strict:
                compare_spread(machine, oracle, ranks)
    one = narrow_machine(machine, PlanSettings(smt=1)).allowed.cpus
    assert all(len(core & one) <= 1 for core in oracle.cores)
    if machine.gpus:
        compare_ranks(machine, oracle, place_ranks(machine, machine.gpus, len(machine.gpus)).ranks)
    return machine


@pytest.mark.parametrize("shape", SYNTHETIC)
def test_synthetic_machines(shape: str, tmp_path: Path) -> None:
    machine = compare_all(shape, tmp_path)
    assert machine.numa_nodes


@pytest.mark.parametrize("name", ["ac922-6gpu-power9.tar.bz2", "minsky-power8-4gpu.hwloc.xml"])
def test_real_machines(name: str, topologies: Path, tmp_path: Path) -> None:
    assert len(compare_all(topologies / name, tmp_path).gpus) in (4, 6)


@pytest.mark.parametrize("path", sorted(MORE.glob("*")) if MORE.is_dir() else [], ids=lambda path: path.name)
def test_more_machines(path: Path, tmp_path: Path) -> None:
    try:
        compare_all(path, tmp_path, strict=False)
    except TopologyError as error:
        pytest.skip(f"refused: {error}")
