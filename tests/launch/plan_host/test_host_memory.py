"""The host memory limit: the formula, where it is cut, widened, refused or left open."""

from collections.abc import Mapping
from dataclasses import replace

import machines
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.model.errors import PlanError
from launch.model.idset import format_ids
from launch.model.settings import PlanSettings
from launch.model.topology import Limits, Machine
from launch.plan_host.host_memory import HostMemory, plan_host_memory
from launch.plan_host.placement import place_ranks

GIB = 1 << 30
MIB = 1 << 20
AC922 = machines.machine("ac922")


def size(machine: Machine, count: int, use_gpus: bool = True, **options: object) -> HostMemory:
    placed = place_ranks(machine, machine.gpus if use_gpus else (), count)
    return plan_host_memory(machine, placed.ranks, PlanSettings(**options))  # type: ignore[arg-type]


def with_memory(machine: Machine, sizes: Mapping[int, int | None]) -> Machine:
    nodes = [replace(node, memory_bytes=sizes.get(node.id, node.memory_bytes)) for node in machine.numa_nodes]
    return replace(machine, numa_nodes=tuple(nodes))


def test_four_times_the_gpu_where_there_is_room() -> None:
    memory = size(machines.machine("ac922"), 4)
    assert [rank.limit_mb for rank in memory.ranks] == [65536] * 4
    assert memory.warnings == ()


def test_a_small_node_cuts_it_and_shows_the_arithmetic() -> None:
    memory = size(with_memory(machines.machine("ac922"), {0: 100 * GIB}), 4)
    assert [rank.limit_mb for rank in memory.ranks] == [46080, 46080, 65536, 65536]
    assert memory.warnings[1:] == ()
    assert memory.warnings[0] == (
        "ranks 0-1: host memory limit clamped to 46080 MiB: 4 x 16384 MiB of GPU memory = 65536 MiB wanted, "
        "(1 - 0.1) x 102400 MiB memory of node 0 / 2 ranks = 46080 MiB there"
    )


def test_gpu_memory_nodes_are_no_host_memory() -> None:
    assert {format_ids(rank.mem_nodes) for rank in size(machines.machine("ac922"), 4).ranks} == {"0", "8"}
    assert format_ids(size(machines.machine("gh200"), 1).ranks[0].mem_nodes) == "0"
    assert format_ids(size(machines.machine("cxl"), 1).ranks[0].mem_nodes) == "0"


def test_a_cgroup_is_shared_by_all_ranks_of_the_host() -> None:
    limited = replace(machines.machine("ac922"), limits=Limits(memory_bytes=100 * GIB))
    memory = size(limited, 4)
    assert [rank.limit_mb for rank in memory.ranks] == [23040] * 4
    assert "(1 - 0.1) x 102400 MiB cgroup limit / 4 ranks = 23040 MiB" in memory.warnings[0]


def test_an_unbound_rank_has_its_share_in_every_node() -> None:
    machine = with_memory(machines.machine("ac922"), {0: 100 * GIB, 8: 100 * GIB})
    lost = replace(machine.gpus[1], numa_node=None, cpus=frozenset())
    gpus = (machine.gpus[0], lost, machine.gpus[2])
    placed = place_ranks(machine, gpus, 3)
    assert [rank.numa_node for rank in placed.ranks] == [0, None, 8]
    memory = plan_host_memory(machine, placed.ranks, PlanSettings(host_mem_multiplier=6))
    limits = [rank.limit_mb or 0 for rank in memory.ranks]
    assert limits == [46080, 61440, 46080]
    assert sum(limits) <= 0.9 * 200 * 1024


def test_the_arithmetic_is_right_for_gpus_of_odd_sizes() -> None:
    machine = with_memory(machines.with_gpu_memory(AC922, 16280 * MIB + 900 * 1024), {0: 100 * GIB})
    assert "4 x 16280.879 MiB of GPU memory = 65123 MiB wanted" in size(machine, 4).warnings[0]


def test_strict_makes_a_cut_an_error() -> None:
    with pytest.raises(PlanError, match=r"--strict: host memory limit clamped .* try --host-mem-multiplier"):
        size(with_memory(machines.machine("ac922"), {0: 100 * GIB}), 4, strict=True)


def test_less_than_the_gpus_own_memory_is_a_limit_too() -> None:
    """An H200 of 140 GiB in a virtual machine of 128: what is there can be swapped to."""
    memory = size(with_memory(machines.machine("ac922"), {0: 30 * GIB}), 4)
    assert [rank.limit_mb for rank in memory.ranks] == [13824, 13824, 65536, 65536]
    assert "host memory limit clamped to 13824 MiB" in memory.warnings[0]


def test_a_share_of_next_to_nothing_is_an_error() -> None:
    with pytest.raises(
        PlanError, match=r"rank 0 keeps 460 MiB of host memory, less than the 1024 MiB that a rank"
    ):
        size(with_memory(machines.machine("ac922"), {0: GIB}), 4)


def test_a_limit_of_the_users_own_is_kept_and_judged() -> None:
    memory = size(with_memory(machines.machine("ac922"), {0: 30 * GIB}), 4, host_mem_limit_mb=20000)
    assert [(rank.limit_mb, rank.fits) for rank in memory.ranks] == [(20000, False)] * 2 + [(20000, True)] * 2
    assert "as asked for, is above the rank's share" in memory.warnings[0]


def test_snc_widens_to_the_package() -> None:
    machine = machines.with_gpu_memory(machines.machine("dgx"), 40 * GIB)
    memory = size(machine, 8)
    assert [format_ids(rank.mem_nodes) for rank in memory.ranks] == ["0-3"] * 4 + ["4-7"] * 4
    # 0.9 x 512 GiB / 4 ranks; a node alone had 57.6 GiB a rank.
    assert {rank.limit_mb for rank in memory.ranks} == {117964}
    assert any(
        "ranks 0-3: one NUMA node is too small, so memory widens to nodes 0-3 of its package" in warning
        for warning in memory.warnings
    )


def test_a_node_without_memory_uses_its_neighbours() -> None:
    memory = size(machines.machine("memless"), 2, gpu_memory_bytes=GIB)
    assert [format_ids(rank.mem_nodes) for rank in memory.ranks] == ["0", "0"]
    assert "rank 1: node 1 has no memory for this job; node 0 serves" in memory.warnings


def test_a_cpu_rank_has_nothing_to_size() -> None:
    assert [rank.limit_mb for rank in size(machines.machine("single"), 2).ranks] == [None, None]


def test_a_cpu_rank_is_sized_when_told_for_what() -> None:
    memory = size(machines.machine("single"), 2, gpu_memory_bytes=2 * GIB, host_mem_multiplier=1.5)
    assert [rank.limit_mb for rank in memory.ranks] == [3072, 3072]


def test_unknown_gpu_memory_is_said() -> None:
    memory = size(machines.machine("cxl"), 1)
    assert memory.ranks[0].limit_mb is None
    assert "give --gpu-memory SIZE" in memory.warnings[0]


def test_unknown_host_memory_is_said() -> None:
    memory = size(with_memory(machines.machine("ac922"), {0: None, 8: None}), 4)
    assert {(rank.limit_mb, rank.fits) for rank in memory.ranks} == {(65536, None)}
    assert "unchecked" in memory.warnings[0]


def test_strict_makes_an_unchecked_limit_an_error() -> None:
    machine = with_memory(machines.machine("ac922"), {0: None, 8: None})
    with pytest.raises(PlanError, match=r"--strict: .* is unchecked: .* try a topology that tells it"):
        size(machine, 4, strict=True)


def test_strict_makes_a_limit_that_nobody_knows_an_error() -> None:
    with pytest.raises(PlanError, match=r"--strict: .*GPU memory cannot be read.* give --gpu-memory SIZE"):
        size(machines.machine("cxl"), 1, strict=True)


def test_gpu_memory_against_what_was_read_is_said() -> None:
    memory = size(machines.machine("ac922"), 1, gpu_memory_bytes=8 * GIB)
    assert memory.ranks[0].limit_mb == 32768
    assert "its GPU has 16384 MiB" in memory.warnings[0]


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(64 * MIB, 1 << 42), min_size=2, max_size=2),
    st.one_of(st.none(), st.integers(64 * MIB, 1 << 42)),
    st.floats(0, 0.99),
    st.integers(1, 4),
)
def test_promises_never_exceed_what_is_there(
    sizes: list[int], cgroup: int | None, reserve: float, count: int
) -> None:
    machine = with_memory(AC922, {0: sizes[0], 8: sizes[1]})
    machine = replace(machine, limits=Limits(memory_bytes=cgroup))
    try:
        memory = size(machine, count, host_mem_reserve=reserve)
    except PlanError as error:
        assert "MiB that a rank needs" in str(error)  # noqa: PT017 - both outcomes are fine
        return
    for node, node_bytes in zip((0, 8), sizes, strict=True):
        promised = sum((rank.limit_mb or 0) * MIB for rank in memory.ranks if node in rank.mem_nodes)
        assert promised <= (1 - reserve) * node_bytes + 1
    if cgroup is not None:
        assert sum((rank.limit_mb or 0) * MIB for rank in memory.ranks) <= (1 - reserve) * cgroup + 1
