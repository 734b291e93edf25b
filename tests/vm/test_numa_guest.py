"""Real kernels with real NUMA nodes: discovery against sysfs, and ranks against /proc and numa_maps."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from numa_guest import Step, run_in_guest

from launch.model.idset import format_ids, parse_ids

pytestmark = pytest.mark.vm

LMSRUN = ("python3", "lmsrun/__main__.py")
RANK = ("--no-tag-output", "--gpu-memory", "64M", "rank_report.py")
MPI_RANK_1 = (
    "env",
    *("OMPI_COMM_WORLD_RANK=1", "OMPI_COMM_WORLD_LOCAL_RANK=1"),
    *("OMPI_COMM_WORLD_SIZE=2", "OMPI_COMM_WORLD_LOCAL_SIZE=2", "RANK=1"),
)


@dataclass(frozen=True)
class Profile:
    """What a profile of the rig must look like; ``ranks`` is one a GPU."""

    name: str
    nodes: dict[int, tuple[str, str]]
    """CPUs and kind by node id."""
    gpu_nodes: tuple[int, ...]
    mems: str
    architecture: str = "x86_64"
    cpu_ranks: bool = False
    """Whether to start two ranks without GPUs as well."""
    libnuma: bool = False
    """Whether to bind with libnuma as well."""
    in_job: tuple[str, str] | None = None
    """CPUs and memory nodes of a batch job to run in as well."""
    offline: tuple[tuple[str, str], ...] = ()
    """Files of /sys/devices/system/cpu to write, and the text; afterwards the topology is read again."""


PROFILES = [
    Profile(
        "ac922",
        {0: ("0-7", "dram"), 8: ("8-15", "dram"), **dict.fromkeys(range(252, 256), ("", "memory-only"))},
        (0, 0, 8, 8),
        "0,8",
        libnuma=True,
        in_job=("10-15", "8"),
    ),
    Profile(
        "dgx",
        {node: (f"{node * 2}-{node * 2 + 1},{16 + node * 2}-{17 + node * 2}", "dram") for node in range(8)},
        (1, 1, 3, 3, 5, 5, 7, 7),
        "0-7",
        offline=(("cpu3/online", "0"), ("cpu17/online", "0")),
    ),
    Profile("flat", {0: ("0-3", "dram")}, (0, 0), "0"),
    Profile("cpuless", {0: ("0-3", "dram"), 1: ("", "memory-only")}, (0,), "0", cpu_ranks=True),
    Profile("memless", {0: ("0-1", "dram"), 1: ("2-3", "dram")}, (0, 1), "0", cpu_ranks=True, libnuma=True),
    Profile(
        "power9",
        {0: ("0-7", "dram"), 8: ("8-15", "dram"), **dict.fromkeys(range(124, 128), ("", "gpu"))},
        (0, 8),
        "0,8",
        architecture="ppc64le",
        offline=(("cpu1/online", "0"), ("cpu12/online", "0")),
    ),
]


def steps(profile: Profile) -> dict[str, Sequence[str]]:
    """The commands of one boot; ``numa_maps`` of each rank is in its report."""
    count = str(len(profile.gpu_nodes))
    commands: dict[str, Sequence[str]] = {
        "nvidia": ("/run/rig/as-nvidia",),
        "truth": ("python3", "truth.py"),
        "topo": (*LMSRUN, "topo", "--json"),
        "tree": (*LMSRUN, "topo"),
        "plan": (*LMSRUN, "plan", "--json", "-np", count, *RANK),
        "run": (*LMSRUN, "run", "-np", count, *RANK),
        "xml": ("lstopo-no-graphics", "--of", "xml", "/tmp/machine.xml"),
        "from-xml": (*LMSRUN, "topo", "--json", "--topology", "/tmp/machine.xml"),
        "from-sys": (*LMSRUN, "topo", "--json", "--topology", "/"),
    }
    if profile.libnuma:
        commands["libnuma-run"] = (*LMSRUN, "run", "-np", count, "--bind-method", "libnuma", *RANK)
    if profile.cpu_ranks:
        commands["cpu-plan"] = (*LMSRUN, "plan", "--json", "-np", "2", "--gpus", "none", *RANK)
        commands["cpu-run"] = (*LMSRUN, "run", "-np", "2", "--gpus", "none", *RANK)
    if count == "2":
        commands["worker"] = (*MPI_RANK_1, *LMSRUN, "worker", "--", "python3", "rank_report.py")
    if profile.in_job:
        job = ("sh", "in-job", *profile.in_job)
        commands["job-topo"] = (*job, *LMSRUN, "topo", "--json")
        commands["job-plan"] = (*job, *LMSRUN, "plan", "--json", "-np", "2", "--gpus", "none", *RANK)
        commands["job-run"] = (*job, *LMSRUN, "run", "-np", "2", "--gpus", "none", *RANK)
    for position, (file, text) in enumerate(profile.offline):
        write = 'echo "$1" >"/sys/devices/system/cpu/$2"'
        commands[f"offline-{position}"] = ("sh", "-c", write, "sh", text, file)
    if profile.offline:
        commands["offline-truth"] = ("python3", "truth.py")
        commands["offline-topo"] = (*LMSRUN, "topo", "--json")
    return commands


@cache
def boot(name: str) -> dict[str, Step]:
    profile = next(profile for profile in PROFILES if profile.name == name)
    with TemporaryDirectory(prefix="lmsrun-vm-") as folder:
        return run_in_guest(profile.name, profile.architecture, steps(profile), Path(folder))


@pytest.fixture(params=PROFILES, ids=lambda profile: profile.name)
def profile(request: pytest.FixtureRequest) -> Profile:
    found: Profile = request.param
    boot(found.name)
    return found


def same_hardware(topology: dict[str, Any], truth: dict[str, Any]) -> None:
    assert {
        str(node["id"]): [node["cpus"], node["memory_bytes"]] for node in topology["numa_nodes"]
    } == truth["nodes"]
    assert sorted(core["cpus"] for core in topology["cores"]) == truth["cores"]
    assert [package["id"] for package in topology["packages"]] == truth["packages"]


def test_topology_is_what_the_kernel_says(profile: Profile) -> None:
    done = boot(profile.name)
    topology, truth = done["topo"].json(), done["truth"].json()
    same_hardware(topology, truth)
    assert {node["id"]: (node["cpus"], node["kind"]) for node in topology["numa_nodes"]} == profile.nodes
    assert [gpu["numa_node"] for gpu in topology["gpus"]] == list(profile.gpu_nodes)
    assert [gpu["pci_bus_id"] for gpu in topology["gpus"]] == sorted(truth["gpus"])
    assert topology["allowed"]["mems"] == profile.mems
    assert topology["architecture"] == profile.architecture
    assert topology["limits"]["set_mempolicy"] is True
    assert topology["warnings"] == []
    assert done["tree"].code == 0


def test_replayed_sources_agree_with_the_live_machine(profile: Profile) -> None:
    done = boot(profile.name)
    live, xml, tree = (done[name].json() for name in ("topo", "from-xml", "from-sys"))
    for key in ("packages", "numa_nodes", "cores", "gpus", "allowed"):
        assert tree[key] == live[key]
    # lstopo leaves out a node without memory (its cores are on no node then), and an only node's distance.
    known = [node for node in live["numa_nodes"] if node["memory_bytes"]]
    keys = (
        "id",
        "cpus",
        "memory_bytes",
        *(["distances"] if 1 < len(known) == len(live["numa_nodes"]) else []),
    )
    for key in keys:
        assert [node.get(key) for node in xml["numa_nodes"]] == [node.get(key) for node in known]
    assert [core["cpus"] for core in xml["cores"]] == [core["cpus"] for core in live["cores"]]
    told = "are on no NUMA node" in "".join(xml["warnings"])
    assert told == any(core["numa_node"] is None for core in xml["cores"])
    assert xml["allowed"]["cpus"] == live["allowed"]["cpus"]


def test_ranks_sit_where_the_plan_said(profile: Profile) -> None:
    done = boot(profile.name)
    ranks_follow(done["plan"].json(), done["run"])
    if profile.libnuma:
        ranks_follow(done["plan"].json(), done["libnuma-run"])
    if profile.cpu_ranks:
        ranks_follow(done["cpu-plan"].json(), done["cpu-run"])


def ranks_follow(plan: dict[str, Any], run: Step) -> None:
    reports = run.reports()
    assert sorted(reports) == [rank["rank"] for rank in plan["ranks"]]
    for rank in plan["ranks"]:
        seen = reports[rank["rank"]]
        assert seen["cpus"] == rank["cpus"]
        assert seen["threads"] == rank["env"]["OMP_NUM_THREADS"]
        assert seen["limit"] == rank["env"].get("TF_GPU_HOST_MEM_LIMIT_IN_MB")
        mems = parse_ids(rank["mem_nodes"])
        if rank["mem_policy"] == "bind":
            assert seen["policy"] == f"bind:{format_ids(mems)}"
            assert {int(node) for node in seen["pages"]} <= mems
        assert sum(seen["pages"].values()) * seen["page_bytes"] >= 4 << 20
    table = [line.split() for line in run.err.splitlines() if " yes" in line or " no" in line]
    assert len([line for line in table if "yes" in line]) == len(plan["ranks"]), run.err


def test_every_gpus_rank_is_on_its_node(profile: Profile) -> None:
    done = boot(profile.name)
    ranks = done["plan"].json()["ranks"]
    assert [rank["gpu"]["index"] for rank in ranks] == list(range(len(profile.gpu_nodes)))
    assert [rank["numa_node"] for rank in ranks] == list(profile.gpu_nodes)
    for rank in ranks:
        assert parse_ids(rank["cpus"]) <= parse_ids(profile.nodes[rank["numa_node"]][0])
    claimed = [cpu for rank in ranks for cpu in parse_ids(rank["cpus"])]
    assert len(claimed) == len(set(claimed))


def test_worker_under_another_launcher_finds_the_same_place() -> None:
    for name in ("flat", "memless", "power9"):
        done = boot(name)
        rank = done["plan"].json()["ranks"][1]
        seen = done["worker"].reports()[1]
        assert seen["cpus"] == rank["cpus"]


def test_batch_job_keeps_its_share() -> None:
    done = boot("ac922")
    topology, plan = done["job-topo"].json(), done["job-plan"].json()
    assert topology["allowed"] == {"cpus": "10-15", "mems": "8"}
    for rank in plan["ranks"]:
        assert parse_ids(rank["cpus"]) <= parse_ids("10-15")
        assert rank["mem_nodes"] == "8"
    ranks_follow(plan, done["job-run"])


@pytest.mark.parametrize("name", ["dgx", "power9"])
def test_cpus_taken_offline(name: str) -> None:
    done = boot(name)
    topology, truth = done["offline-topo"].json(), done["offline-truth"].json()
    same_hardware(topology, truth)
    assert len(topology["cores"]) == len(done["topo"].json()["cores"])
    assert topology["allowed"]["cpus"] == format_ids(
        cpu for core in topology["cores"] for cpu in parse_ids(core["cpus"])
    )
