"""What --place, --span, --smt, --reserve-cores, --omp-places and --adapter do to a plan."""

import re
from dataclasses import replace
from typing import Any

import machines
import pytest

from launch.discover import read_tree
from launch.discover.tree import MemoryTree
from launch.model.errors import PlanError, UsageError
from launch.model.idset import format_ids
from launch.model.plan import LaunchPlan
from launch.model.settings import PlanSettings, declared_options, parse_option
from launch.model.topology import Machine
from launch.plan_host.planner import HostPlan, HostRequest, plan_host, plan_slots
from lmsrun.render.plan import render_plan

AC922 = machines.machine("ac922")  # nodes 0 and 8, two GPUs each, 16 cores of four threads each


def plan(ranks: int, machine: Machine = AC922, **settings: Any) -> HostPlan:
    asked = PlanSettings(gpu_memory_bytes=16 << 30, **settings)
    return plan_host(machine, HostRequest(("t.py",), ranks, ranks, settings=asked))


def test_spread_takes_gpus_of_every_node_and_gives_more_host_memory() -> None:
    packed, spread = plan(2), plan(2, place="spread")
    assert [rank.numa_node for rank in packed.ranks] == [0, 0]
    assert [rank.numa_node for rank in spread.ranks] == [0, 8]
    tokens = f"{AC922.gpus[0].uuid},{AC922.gpus[2].uuid}"
    for name in ("LMSRUN_GPUS", "CUDA_VISIBLE_DEVICES"):
        assert [rank.env[name] for rank in spread.ranks] == [tokens] * 2
    assert len(spread.ranks[0].cpus) == 2 * len(packed.ranks[0].cpus)
    said = "--place spread: ranks on nodes 0 (1) + 8 (1), to share the nodes' memory more evenly"
    assert said in spread.warnings
    assert (
        "ranks are packed on node 0 (2), on GPUs that are neighbours; "
        "--place spread would put them on nodes 0 (1) + 8 (1)" in packed.warnings
    )


@pytest.mark.parametrize(("place", "ranks"), [("spread", 1), ("spread", 3), ("packed", 1)])
def test_nothing_is_said_of_a_place_that_changes_nothing(place: str, ranks: int) -> None:
    assert "nodes' memory" not in str(plan(ranks, place=place).warnings)
    assert "packed" not in str(plan(1, place=place).warnings)


def test_all_gpus_are_all_gpus_however_they_are_placed() -> None:
    assert [rank.gpu for rank in plan(4, place="spread").ranks] == [rank.gpu for rank in plan(4).ranks]


def test_cpu_ranks_can_be_packed() -> None:
    assert [rank.numa_node for rank in plan(2, gpus="none", place="packed").ranks] == [0, 0]
    assert {rank.numa_node for rank in plan(20, gpus="none", place="packed").ranks} == {0, 8}


def test_a_lone_cpu_rank_has_the_whole_machine_and_its_memory() -> None:
    (rank,) = plan(1, gpus="none").ranks
    assert (rank.cpus, rank.mem_nodes) == (AC922.allowed.cpus, frozenset({0, 8}))
    (narrow,) = plan(1, gpus="none", span="off").ranks
    assert (format_ids(narrow.cpus), narrow.mem_nodes) == ("0-63", frozenset({0}))


def test_three_cpu_ranks_on_eight_nodes_have_all_of_them() -> None:
    machine = machines.machine("dgx")
    ranks = plan(3, machine, gpus="none").ranks
    assert frozenset().union(*(rank.cpus for rank in ranks)) == machine.allowed.cpus
    assert sum(len(rank.cpus) for rank in ranks) == len(machine.allowed.cpus)
    assert sorted(node for rank in ranks for node in rank.mem_nodes) == sorted(
        node.id for node in machine.numa_nodes
    )


def test_a_gpu_near_several_nodes_can_have_all_of_them() -> None:
    near = AC922.allowed.cpus
    gpus = (replace(AC922.gpus[0], numa_node=None, cpus=near), *AC922.gpus[1:])
    machine = replace(AC922, gpus=gpus)
    assert len(plan(1, machine).ranks[0].mem_nodes) == 1
    assert plan(1, machine, span="on").ranks[0].mem_nodes == {0, 8}
    both = plan(2, machine, span="on").ranks
    assert not both[0].cpus & both[1].cpus


@pytest.mark.parametrize(("smt", "threads"), [(1, 1), (2, 2), (None, 4), (9, 4)])
def test_smt_counts_the_threads_of_a_core(smt: int | None, threads: int) -> None:
    planned = plan(4, smt=smt)
    for rank in planned.ranks:
        cores = [core.cpus & rank.cpus for core in AC922.cores if core.cpus & rank.cpus]
        assert {len(core) for core in cores} == {threads}
        assert len(cores) == 8
    said = "--smt 9: cores have 4 hardware threads here, and all are used"
    assert (said in planned.warnings) == (smt == 9)


@pytest.mark.parametrize(("text", "value"), [("on", None), ("off", 1), ("2", 2)])
def test_smt_as_it_is_written(text: str, value: int | None) -> None:
    assert parse_option(declared_options(PlanSettings)["smt"], text, "--smt") == value


def test_a_wrong_smt_is_refused() -> None:
    with pytest.raises(UsageError, match="needed on, off or a whole number, at least 1"):
        parse_option(declared_options(PlanSettings)["smt"], "0", "--smt")


def test_reserved_cores_are_the_first_of_the_nodes_in_turn() -> None:
    taken = frozenset().union(*(rank.cpus for rank in plan(4, reserve_cores=3).ranks))
    assert format_ids(AC922.allowed.cpus - taken) == "0-7,64-67"
    settings = PlanSettings(gpus="none", reserve_cores=3)
    assert plan_slots(AC922, settings, {}) == plan_slots(AC922, PlanSettings(gpus="none"), {}) - 3


def test_all_cores_cannot_be_reserved() -> None:
    with pytest.raises(PlanError, match="--reserve-cores 32 leaves no core for the job"):
        plan(1, reserve_cores=32)


def test_openmp_gets_places_only_when_asked() -> None:
    assert not {"OMP_PLACES", "OMP_PROC_BIND"} & plan(4).ranks[0].env.keys()
    env = plan(4, omp_places="cores", smt=2).ranks[0].env
    assert env["OMP_PLACES"].startswith("{0,1},{4,5},{8,9}")
    assert (env["OMP_PROC_BIND"], env["OMP_NUM_THREADS"]) == ("spread", "8")
    env = plan(4, omp_places="threads", smt=2).ranks[0].env
    assert env["OMP_PLACES"].startswith("{0},{1},{4},{5}")
    assert env["OMP_NUM_THREADS"] == "16"
    unbound = plan(4, omp_places="cores", numa="off")
    assert "OMP_PLACES" not in unbound.ranks[0].env
    assert "--omp-places cores has no effect: ranks are not bound to CPUs" in unbound.warnings
    assert not [said for said in plan(4, omp_places="cores").warnings if "omp-places" in said]


def test_a_plan_shows_what_each_rank_alone_gets() -> None:
    planned = plan(4, omp_places="cores")
    text = render_plan(LaunchPlan(4, "local", planned.ranks, ()), AC922, 100)
    assert "and of each:\n  rank 0: OMP_PLACES={0" in text.replace("'", "")
    assert "LOCAL_RANK=" not in text


def test_a_plan_names_every_variable_of_its_ranks() -> None:
    """But for what is for lmsrun's own process in the rank alone."""
    planned = plan(4)
    text, verbose = (
        render_plan(LaunchPlan(4, "local", planned.ranks, ()), AC922, 100, told).partition("\ncommands:")[0]
        for told in (False, True)
    )
    names = {name for rank in planned.ranks for name in rank.env} - {"LMSRUN_EXPECT"}
    assert [name for name in names if not re.search(rf"\b{name}\b", text)] == []
    untold = re.search("of each, shown with --verbose:\n  (.*)\n", text)
    assert untold and "LOCAL_RANK" in untold[1]
    for name in untold[1].split(", "):
        assert f"{name}=" in verbose and f"{name}=" not in text
    assert "shown with" not in verbose


def test_a_plan_of_one_rank_leaves_no_variable_out() -> None:
    planned = plan(1)
    assert "shown with" not in render_plan(LaunchPlan(1, "local", planned.ranks, ()), AC922, 100)


def with_adapters(spec: machines.MachineSpec) -> Machine:
    """The machine with an adapter behind the bridge of each of its first two GPUs, each with a dead port."""
    links, files = machines.build_links(spec), machines.build_files(spec)
    for number, gpu in enumerate(spec.gpus[:2]):
        device = f"sys/devices/pci000{number}:00/000{number}:00:00.0/000{number}:02:00.0"
        gpu_at = f"sys/devices/pci000{number}:00/000{number}:00:00.0/{gpu.address}"
        for path in [path for path in files if path.startswith(f"sys/bus/pci/devices/{gpu.address}/")]:
            files[path.replace(f"sys/bus/pci/devices/{gpu.address}", gpu_at)] = files.pop(path)
        links[f"sys/bus/pci/devices/{gpu.address}"] = "/".join(("../../../..", gpu_at))
        files[f"{device}/numa_node"] = str(gpu.numa_node)
        links[f"sys/class/infiniband/mlx5_{number}/device"] = "/".join(("../../../..", device))
        files[f"sys/class/infiniband/mlx5_{number}/ports/1/state"] = "4: ACTIVE"
        files[f"sys/class/infiniband/mlx5_{number}/ports/2/state"] = "1: DOWN"
    encoded = {path: text.encode() for path, text in files.items()}
    return read_tree(MemoryTree(encoded, links), "with adapters")


def test_the_nearest_adapter_of_several_is_named_when_asked() -> None:
    machine = with_adapters(machines.SPECS["ac922"])
    assert [adapter.name for adapter in machine.adapters] == ["mlx5_0:1", "mlx5_1:1"]
    ranks = plan(2, machine, adapter="nearest").ranks
    assert [rank.env["UCX_NET_DEVICES"] for rank in ranks] == ["mlx5_0:1", "mlx5_1:1"]
    assert [rank.env["NCCL_IB_HCA"] for rank in ranks] == ["=mlx5_0:1", "=mlx5_1:1"]
    assert "UCX_NET_DEVICES" not in plan(2, machine).ranks[0].env
    alone = replace(machine, adapters=machine.adapters[:1])
    assert "UCX_NET_DEVICES" not in plan(2, alone, adapter="nearest").ranks[0].env
    assert read_back(machine).adapters == machine.adapters


def read_back(machine: Machine) -> Machine:
    from launch.discover.saved import from_json, to_json

    return from_json(to_json(machine))


def test_without_a_bridge_in_common_the_node_decides() -> None:
    machine = with_adapters(machines.SPECS["ac922"])
    nodes = (0, 8)
    adapters = tuple(
        replace(adapter, near_gpus=(), numa_node=node)
        for adapter, node in zip(machine.adapters, nodes, strict=True)
    )
    ranks = plan(4, replace(machine, adapters=adapters), adapter="nearest").ranks
    assert [rank.env["UCX_NET_DEVICES"] for rank in ranks] == ["mlx5_0:1"] * 2 + ["mlx5_1:1"] * 2
