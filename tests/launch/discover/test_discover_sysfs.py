"""Machines as trees of the kernel's files, synthetic and real."""

import os
from dataclasses import replace
from pathlib import Path

import machines
import pytest

from launch.discover import find_gpus, read_machine, read_tree
from launch.discover.check import check
from launch.discover.tree import DirTree, MemoryTree
from launch.model.errors import TopologyError
from launch.model.idset import format_ids
from launch.model.topology import Machine


def kinds(machine: Machine) -> dict[int, str]:
    return {node.id: node.kind for node in machine.numa_nodes}


def cores(machine: Machine) -> list[str]:
    return [format_ids(core.cpus) for core in machine.cores]


@pytest.mark.parametrize("name", machines.SPECS)
def test_a_directory_and_memory_give_the_same_machine(name: str, tmp_path: Path) -> None:
    machine = machines.machine(name)
    check(machine)
    root = machines.build_root(name, tmp_path)
    assert replace(read_machine(str(root)), source=name) == machine


def test_real_ac922(topologies: Path) -> None:
    """Trap 1: nodes 0 and 8; GPU memory is nodes 250-255. Trap 8: 176 CPUs possible, 32 of them online."""
    machine = read_machine(str(topologies / "ac922-6gpu-power9.tar.bz2"))
    assert machine.architecture == "ppc64le"
    assert kinds(machine) == {0: "dram", 8: "dram"} | dict.fromkeys(range(250, 256), "gpu")
    assert [(p.id, format_ids(p.cpus), p.numa_nodes) for p in machine.packages] == [
        (0, "0-15", (0,)),
        (8, "88-103", (8,)),
    ]
    assert cores(machine) == ["0-3", "4-7", "8-11", "12-15", "88-91", "92-95", "96-99", "100-103"]
    assert [(g.pci_bus_id, g.numa_node, format_ids(g.cpus), g.vendor) for g in machine.gpus] == [
        ("0004:05:00.0", 0, "0-15", "nvidia"),
        ("0004:06:00.0", 0, "0-15", "nvidia"),
        ("0006:00:00.0", 0, "0-15", "nvidia"),
        ("0007:00:00.0", 8, "88-103", "nvidia"),
        ("0035:04:00.0", 8, "88-103", "nvidia"),
        ("0035:05:00.0", 8, "88-103", "nvidia"),
    ]
    assert {gpu.memory_bytes for gpu in machine.gpus} == {16911433728}
    assert {node.id: node.memory_bytes for node in machine.numa_nodes} == {
        0: 132955242496,
        8: 137166848000,
        **dict.fromkeys(range(250, 256), 16106127360),
    }
    assert (format_ids(machine.allowed.cpus), format_ids(machine.allowed.mems)) == ("0-15,88-103", "0,8")
    node = machine.numa_node(8)
    assert node is not None
    assert dict(node.distances) == {0: 40, 8: 10, **dict.fromkeys(range(250, 256), 80)}
    assert machine.warnings == ()


def test_gpu_memory_never_in_mems_whatever_its_ids() -> None:
    """Trap 1: Grace Hopper shows GPU memory as nodes 1-8, seven of them empty (kept for MIG)."""
    machine = machines.machine("gh200")
    assert kinds(machine) == {0: "dram"} | dict.fromkeys(range(1, 9), "gpu")
    assert machine.allowed.mems == {0}
    assert machine.gpus[0].memory_bytes == 96 * machines.GIB


def test_generic_initiators_tell_gpu_memory_without_the_drivers_folder() -> None:
    spec = machines.SPECS["gh200"]
    bare = replace(spec, gpus=tuple(replace(gpu, in_driver=False) for gpu in spec.gpus))
    assert kinds(machines.machine(bare)) == {0: "dram"} | dict.fromkeys(range(1, 9), "gpu")


def test_power9_tells_gpu_memory_without_numa_status() -> None:
    spec = machines.SPECS["ac922"]
    bare = replace(spec, gpus=tuple(replace(gpu, memory_node=None) for gpu in spec.gpus))
    assert kinds(machines.machine(bare)) == {0: "dram", 8: "dram"} | dict.fromkeys(range(252, 256), "gpu")


def test_memory_of_a_gpu_that_is_denied_is_not_the_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launch.discover.nvml.import_nvml", lambda: None)
    root = machines.build_root("ac922", tmp_path)
    for minor, folder in enumerate(sorted((root / "proc/driver/nvidia/gpus").iterdir())):
        with (folder / "information").open("a") as about:
            about.write(f"\nDevice Minor: \t {minor}\n")
    (root / "dev").mkdir()
    (root / "dev/nvidia0").touch()
    machine = read_machine(root=str(root))
    assert len(machine.gpus) == 1
    assert kinds(machine) == {0: "dram", 8: "dram"} | dict.fromkeys(range(252, 256), "gpu")


def test_memory_of_nobody_is_not_a_gpus() -> None:
    """Trap 1: CXL memory is no host memory either, with or without a GPU beside it."""
    machine = machines.machine("cxl")
    assert kinds(machine) == {0: "dram", 1: "memory-only"}
    assert machine.allowed.mems == {0}


def test_cpuset_limits_are_read() -> None:
    """Trap 3: affinity and Mems_allowed_list, and the tightest limit of the cgroup's way up."""
    machine = machines.machine("cpuset")
    assert (format_ids(machine.allowed.cpus), format_ids(machine.allowed.mems)) == ("18-29", "1")
    assert machine.limits.memory_bytes == 24 * machines.GIB


def test_allowed_names_only_what_exists() -> None:
    """A container's mask may name CPUs that are offline or that the machine never had."""
    machine = machines.machine(
        replace(machines.SPECS["cpuset"], allowed_cpus="0-1,40-4095", allowed_mems="0,7")
    )
    assert (machine.allowed.cpus, machine.allowed.mems) == ({0, 1}, {0})


def test_node_without_memory() -> None:
    """Trap 6: its CPUs count, its memory does not."""
    machine = machines.machine(replace(machines.SPECS["memless"], allowed_mems="0-1"))
    node = machine.numa_node(1)
    assert node is not None
    assert (node.memory_bytes, node.cpus) == (0, {4, 5, 6, 7})
    assert machine.allowed.mems == {0}
    assert machine.gpus[1].numa_node == 1


def test_smt8_with_offline_threads_and_cores() -> None:
    """Trap 8: cores follow thread_siblings_list, whatever is offline and however the ids run."""
    assert cores(machines.machine("smt8-offline")) == [
        "0-3",
        "16-19",
        "24-27",
        "64-67",
        "72-75",
        "80-83",
        "88-91",
    ]
    assert cores(machines.machine("single")) == ["0,4", "1,5", "2,6", "3,7"]
    assert len(machines.machine("dgx").cores) == 128


def test_several_nodes_a_package() -> None:
    """Trap 7 begins here: the planner widens to the package's nodes."""
    assert [package.numa_nodes for package in machines.machine("dgx").packages] == [
        (0, 1, 2, 3),
        (4, 5, 6, 7),
    ]


def test_unknown_package_stays_unknown() -> None:
    spec = machines.MachineSpec(nodes=(machines.NodeSpec(0, "0-3", None, machines.GIB),))
    machine = machines.machine(spec)
    assert machine.packages == ()
    assert (machine.numa_nodes[0].package, machine.cores[0].package) == (None, None)


def test_node_over_two_packages_has_none() -> None:
    spec = machines.MachineSpec(nodes=(machines.NodeSpec(0, "0-3", 0, machines.GIB),))
    second = {f"sys/devices/system/cpu/cpu{cpu}/topology/physical_package_id": "1" for cpu in (2, 3)}
    machine = machines.machine(replace(spec, extra=second))
    assert machine.numa_nodes[0].package is None
    assert [(p.id, p.numa_nodes) for p in machine.packages] == [(0, (0,)), (1, (0,))]


def test_kernel_without_numa(tmp_path: Path) -> None:
    cpu = tmp_path / "sys/devices/system/cpu"
    for number in (0, 1):
        (cpu / f"cpu{number}").mkdir(parents=True)
    (cpu / "cpufreq").mkdir()
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal:        4096 kB\nMemFree: 1 kB\n")
    machine = read_machine(str(tmp_path))
    assert [(node.id, node.cpus, node.memory_bytes) for node in machine.numa_nodes] == [(0, {0, 1}, 4 << 20)]
    assert machine.warnings == ("the kernel shows no NUMA nodes: taken as one node 0",)


def test_the_only_node_has_the_memory_that_the_machine_tells_of() -> None:
    """A virtual machine whose memory grows as it is used: its node has little yet."""
    grown = {"proc/meminfo": "MemTotal:       131072000 kB\n"}
    machine = machines.machine(replace(machines.SPECS["single"], extra=grown))
    assert [node.memory_bytes for node in machine.numa_nodes] == [131072000 << 10]
    several = machines.machine(replace(machines.SPECS["ac922"], extra=grown))
    assert several.numa_nodes[0].memory_bytes == machines.machine("ac922").numa_nodes[0].memory_bytes


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("sys/devices/system/cpu/online", "0-3,junk"),
        ("sys/devices/system/node/node0/cpulist", "all"),
        ("proc/self/status", "Cpus_allowed_list:\tzero"),
    ],
)
def test_damaged_files_are_named(path: str, text: str) -> None:
    with pytest.raises(TopologyError, match="id list") as caught:
        machines.machine(replace(machines.SPECS["single"], extra={path: text}))
    assert path in str(caught.value)


@pytest.mark.parametrize("junk", ["", "\0", "²", "٣", "-1", "9" * 5000, "1 2 3", "a: b\n: \n"])
def test_junk_in_any_file_is_refused_or_unknown(junk: str) -> None:
    known = machines.SPECS["ac922"]
    cpus = {0: "0-3", 8: "64-67"}
    small = tuple(replace(node, cpus=cpus.get(node.id, "")) for node in known.nodes)
    spec = replace(known, nodes=small, memory_limits=("max", "1"))
    for path in sorted(machines.build_files(spec)):
        try:
            check(machines.machine(replace(spec, extra={path: junk})))
        except TopologyError as error:
            assert "\n" not in str(error)


@pytest.mark.parametrize("of", ["dgx", "gh200", "ac922", "cpuset"])
def test_texts_end_at_the_first_nul(of: str, tmp_path: Path) -> None:
    """Some kernels did not trim the page they printed to: 11 of hwloc's own archives hold such files."""
    files = machines.build_files(machines.SPECS[of])
    padded = {
        path: f"{text}\n\0".encode() if path.startswith("sys/") else text.encode()
        for path, text in files.items()
    }
    assert read_tree(MemoryTree(padded, machines.build_links(machines.SPECS[of])), of) == machines.machine(of)
    root = machines.build_root(of, tmp_path)
    for path in files:
        (root / path).write_bytes(padded[path] + b"left over" * path.startswith("sys/"))
    assert replace(read_machine(str(root)), source=of) == machines.machine(of)


def test_a_cpu_on_several_nodes_is_told() -> None:
    """Firmware that lies: such a machine runs, so it is read."""
    at = "sys/devices/system/node"
    spec = replace(
        machines.SPECS["cpuset"], extra={f"{at}/node1/cpulist": "8-31"}, allowed_cpus=None, allowed_mems=None
    )
    machine = machines.machine(spec)
    assert [format_ids(node.cpus) for node in machine.numa_nodes] == ["0-15", "16-31"]
    assert machine.warnings == (
        "CPUs 8-15 are on several NUMA nodes: taken as on the one with the lowest number",
    )


def test_links_out_of_a_saved_directory_are_not_followed(tmp_path: Path) -> None:
    root = machines.build_root("single-gpu-unknown", tmp_path / "tree")
    secret = tmp_path / "secret"
    secret.write_text("Model: outside\n")
    folder = root / "proc/driver/nvidia/gpus/0000:01:00.0"
    folder.mkdir(parents=True)
    (folder / "information").symlink_to(secret)
    assert read_machine(str(root)).gpus[0].name is None


def test_a_gpu_whose_device_file_is_kept_from_this_job_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NVML leaves such GPUs out, and CUDA counts the others; the driver's folder in ``proc/`` does not."""
    gpus = [f"0000:{bus:02x}:00.0" for bus in range(1, 5)]
    for minor, address in enumerate(gpus):
        folder = tmp_path / "proc/driver/nvidia/gpus" / address
        folder.mkdir(parents=True)
        (folder / "information").write_text(f"Model: \t X\nDevice Minor: \t {minor}\n")
    tree = DirTree(str(tmp_path))
    assert [gpu.pci_bus_id for gpu in find_gpus(tree, None)[0]] == gpus, (
        "the driver makes the files at first use"
    )
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidia3").touch()
    (tmp_path / "dev/nvidia1").touch()
    assert [gpu.pci_bus_id for gpu in find_gpus(tree, None)[0]] == [gpus[1], gpus[3]]
    monkeypatch.setattr(os, "access", lambda path, _: path.endswith("nvidia1"))
    assert [gpu.pci_bus_id for gpu in find_gpus(tree, None)[0]] == [gpus[1]]
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert find_gpus(tree, None)[0] == (), "a job without GPUs has none"


def test_live_machine() -> None:
    machine = read_machine()
    assert machine.source == "live"
    assert machine.allowed.cpus <= frozenset().union(*(core.cpus for core in machine.cores))
    assert machine.limits.set_mempolicy in (True, False, None)
