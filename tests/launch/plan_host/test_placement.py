"""Placement: the rules of the plan on odd machines, and properties on any machine."""

from dataclasses import replace

import machines
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.model.idset import format_ids, parse_ids
from launch.model.topology import Allowed, Core, Gpu, Machine, NumaNode, Package
from launch.plan_host.placement import allowed_cores, count_slots, place_ranks

GIB = 1 << 30


def describe(
    machine: Machine, count: int, gpus: tuple[Gpu, ...] | None = None
) -> list[tuple[int | None, str]]:
    placed = place_ranks(machine, machine.gpus if gpus is None else gpus, count)
    return [(rank.numa_node, format_ids(rank.cpus)) for rank in placed.ranks]


def test_gpu_ranks_split_their_node_into_whole_cores() -> None:
    assert describe(machines.machine("dgx"), 8)[:3] == [
        (3, "48-55,176-183"),
        (3, "56-63,184-191"),
        (1, "16-23,144-151"),
    ]


def test_a_lone_rank_of_a_node_gets_all_of_it() -> None:
    assert describe(machines.machine("ac922"), 1) == [(0, "0-63")]


def test_the_first_ranks_get_the_remainder() -> None:
    machine = machines.machine("single")  # four cores of two PUs
    placed = place_ranks(machine, (), 3)
    assert [rank.cores for rank in placed.ranks] == [2, 1, 1]
    assert [format_ids(rank.cpus) for rank in placed.ranks] == ["0-1,4-5", "2,6", "3,7"]


def test_cpu_ranks_are_dealt_round_robin() -> None:
    assert [node for node, _ in describe(machines.machine("ac922"), 4, ())] == [0, 8, 0, 8]


def test_cpu_ranks_follow_the_cores_of_uneven_nodes() -> None:
    machine = machines.machine(replace(machines.SPECS["ac922"], allowed_cpus="0-47,64-79"))  # 12 cores and 4
    nodes = [node for node, _ in describe(machine, 4, ())]
    assert (nodes.count(0), nodes.count(8)) == (3, 1)
    assert nodes[:2] == [0, 8] or nodes[:3] == [0, 0, 8]


def test_offline_threads_and_holes() -> None:
    assert [cpus for _, cpus in describe(machines.machine("smt8-offline"), 2)] == [
        "0-3,16-19,24-27",
        "64-67,72-75,80-83,88-91",
    ]


def test_a_gpu_outside_the_cpuset_uses_the_nearest_allowed_node_and_says_so() -> None:
    placed = place_ranks(machines.machine("cpuset"), machines.machine("cpuset").gpus, 2)
    assert [rank.numa_node for rank in placed.ranks] == [1, 1]
    assert placed.warnings == (
        "GPU 0 (0000:3b:00.0): its node 0 has no CPU that this job may use; node 1 serves",
    )


def test_an_unknown_node_is_not_node_zero() -> None:
    machine = machines.machine("unknown-node")
    placed = place_ranks(machine, machine.gpus, 2)
    assert [(rank.numa_node, rank.cpus) for rank in placed.ranks] == [(None, frozenset())] * 2
    assert len(placed.warnings) == 1
    assert "not bound" in placed.warnings[0]


def test_cores_on_no_node_are_near_no_gpu() -> None:
    machine = machines.machine("unknown-node")
    stray = min(machine.cores, key=lambda core: min(core.cpus))
    nodes = tuple(replace(node, cpus=node.cpus - stray.cpus) for node in machine.numa_nodes)
    cores = tuple(replace(core, numa_node=None) if core == stray else core for core in machine.cores)
    placed = place_ranks(replace(machine, numa_nodes=nodes, cores=cores), machine.gpus, 2)
    assert [(rank.numa_node, rank.cpus) for rank in placed.ranks] == [(None, frozenset())] * 2
    assert placed.ranks[0].cores == len(cores) // 2


def test_an_unknown_node_with_near_cpus_takes_the_least_loaded_of_their_nodes() -> None:
    machine = machines.machine("ac922")
    gpus = tuple(replace(gpu, numa_node=None, cpus=parse_ids("0-127")) for gpu in machine.gpus)
    assert [node for node, _ in describe(machine, 4, gpus)] == [0, 8, 0, 8]


def test_more_ranks_than_cores_of_a_node_share_and_are_told() -> None:
    machine = machines.machine(replace(machines.SPECS["ac922"], allowed_cpus="0-3,64-127"))
    placed = place_ranks(machine, machine.gpus, 4)
    assert [format_ids(rank.cpus) for rank in placed.ranks[:2]] == ["0-3", "0-3"]
    assert any("2 ranks share the 1 core of node 0" in warning for warning in placed.warnings)


@pytest.mark.parametrize(("name", "slots"), [("dgx", 8), ("single", 4), ("gh200", 1)])
def test_slots(name: str, slots: int) -> None:
    assert count_slots(machines.machine(name), machines.machine(name).gpus) == slots


def test_slots_without_gpus_are_the_allowed_cores() -> None:
    assert count_slots(machines.machine("cpuset"), ()) == 6


def test_cpus_that_no_core_claims_count_as_cores() -> None:
    machine = replace(machines.machine("single"), cores=())
    assert [format_ids(core.cpus) for core in allowed_cores(machine)] == [str(cpu) for cpu in range(8)]
    assert {core.numa_node for core in allowed_cores(machine)} == {0}


@st.composite
def any_machine(draw: st.DrawFn) -> Machine:
    """Nodes with sparse ids, cores of 1-8 PUs with sparse ids, an arbitrary allowed set, GPUs anywhere."""
    node_ids = draw(st.lists(st.integers(0, 300), min_size=1, max_size=4, unique=True).map(sorted))
    threads = draw(st.sampled_from([1, 2, 4, 8]))
    stride = draw(st.integers(threads, 2 * threads))
    cores, start = [], 0
    for node in node_ids:
        for _ in range(draw(st.integers(0, 6))):
            cores.append(Core(node, node, frozenset(range(start, start + threads))))
            start += stride
    cpus = frozenset().union(*(core.cpus for core in cores))
    allowed = frozenset(cpu for cpu in cpus if draw(st.booleans())) if draw(st.booleans()) else cpus
    nodes = tuple(
        NumaNode(
            node,
            node,
            frozenset().union(*(core.cpus for core in cores if core.numa_node == node)),
            8 * GIB,
            "dram",
        )
        for node in node_ids
    )
    gpus = tuple(
        Gpu(index, f"{index:04x}:01:00.0", numa_node=draw(st.sampled_from([None, *node_ids])))
        for index in range(draw(st.integers(0, 5)))
    )
    packages = tuple(Package(node.id, node.cpus, (node.id,)) for node in nodes)
    return Machine("any", "any", packages, nodes, tuple(cores), gpus, Allowed(allowed, frozenset(node_ids)))


@settings(max_examples=150, deadline=None)
@given(any_machine(), st.integers(1, 12))
def test_placement_properties(machine: Machine, count: int) -> None:
    placed = place_ranks(machine, machine.gpus, count)
    cores = allowed_cores(machine)
    assert placed == place_ranks(machine, machine.gpus, count)
    assert [rank.local_rank for rank in placed.ranks] == list(range(count))
    for rank in placed.ranks:
        assert rank.cpus <= machine.allowed.cpus
        assert rank.cores >= 1
        whole = [core.cpus for core in cores if core.cpus & rank.cpus]
        assert frozenset().union(*whole) == rank.cpus
        homes = rank.numa_nodes or {rank.numa_node}
        assert all(core.numa_node in homes for core in cores if core.cpus & rank.cpus)
    for node in {rank.numa_node for rank in placed.ranks if rank.cpus}:
        mates = [rank for rank in placed.ranks if rank.numa_node == node and rank.cpus]
        here = [core for core in cores if core.numa_node == node]
        sizes = [sum(1 for core in here if core.cpus & mate.cpus) for mate in mates]
        assert max(sizes) - min(sizes) <= 1
        if len(mates) <= len(here):
            assert sizes == sorted(sizes, reverse=True)
            assert sum(sizes) == len(here)
            assert sum(len(mate.cpus) for mate in mates) == len(
                frozenset().union(*(mate.cpus for mate in mates))
            )
        else:
            assert set(sizes) == {1}


@settings(max_examples=100, deadline=None)
@given(any_machine(), st.integers(1, 24))
def test_cpu_ranks_never_crowd_a_node_while_another_has_cores_left(machine: Machine, count: int) -> None:
    placed = place_ranks(machine, (), count)
    cores = allowed_cores(machine)
    if count <= len(cores):
        for node in machine.numa_nodes:
            here = sum(1 for core in cores if core.numa_node == node.id)
            assert sum(1 for rank in placed.ranks if rank.numa_node == node.id) <= here
