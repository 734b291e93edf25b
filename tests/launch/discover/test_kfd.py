"""AMD's GPUs as their compute driver shows them: order, partitions of MI300s, what a container hides."""

from dataclasses import replace

import machines
import pytest
from machines import GIB, MI300X, SPECS, kfd_files

from launch.discover.saved import parse_saved, to_json
from launch.model.busy import gpu_key
from launch.plan_host.gpu_choice import choose_gpus, find_gpu
from launch.plan_host.planner import HostRequest, plan_host
from lmsrun.render.plan import render_json

NODES = "sys/devices/virtual/kfd/kfd/topology/nodes"


@pytest.mark.parametrize(("name", "parts"), [("mi300x", 1), ("mi300x-dpx", 2), ("mi300x-cpx", 8)])
def test_each_partition_is_a_gpu(name: str, parts: int) -> None:
    gpus = machines.machine(name).gpus
    assert len(gpus) == 8 * parts
    assert [gpu.numa_node for gpu in gpus] == [node for _, node in MI300X for _ in range(parts)]
    assert {gpu.memory_bytes for gpu in gpus} == {192 * GIB // parts}
    assert len({gpu_key(gpu) for gpu in gpus}) == len(gpus)
    assert [gpu.partition for gpu in gpus[:2]] == ([None, None] if parts == 1 else [0, 1])
    assert (gpus[0].uuid is None) == (parts > 1), "parts may share the GPU's"


def test_gpus_are_counted_as_hip_does() -> None:
    spec = SPECS["mi300x"]
    ids = [(gpu.address, number) for number, gpu in enumerate(spec.gpus)]
    turned = machines.machine(replace(spec, extra=kfd_files(ids[::-1])))
    assert [gpu.pci_bus_id[5:7] for gpu in turned.gpus] == [bus for bus, _ in MI300X[::-1]]
    choice = choose_gpus(turned, "0000:e5:00.0", {})
    assert choice.env == (("HIP_VISIBLE_DEVICES", "0"),)


def test_drivers_that_put_the_partition_where_the_function_is() -> None:
    files = kfd_files([("0000:05:00.0", 1)], 8)
    for part in range(8):
        path = f"{NODES}/{part + 2}/properties"
        files[path] = files[path].replace(f"location_id {part << 28 | 0x500}", f"location_id {0x500 | part}")
    spec = replace(SPECS["mi300x"], gpus=SPECS["mi300x"].gpus[:1], extra=files)
    assert [gpu.address for gpu in machines.machine(spec).gpus] == [
        f"0000:05:00.0/{part}" for part in range(8)
    ]


def test_gpus_that_a_container_does_not_show_are_none() -> None:
    files = {path: text for path, text in SPECS["mi300x"].extra.items() if f"{NODES}/4/" not in path}
    shown = machines.machine(replace(SPECS["mi300x"], extra=files)).gpus
    assert [gpu.index for gpu in shown] == list(range(7))
    assert "0000:46:00.0" not in [gpu.pci_bus_id for gpu in shown]


@pytest.mark.parametrize(
    "text", ["", "simd_count", "simd_count x", "simd_count 4\nlocation_id 9999999999999"]
)
def test_damaged_nodes_are_left_out(text: str) -> None:
    files = {path: text for path in SPECS["mi300x"].extra if path.endswith("properties")}
    gpus = machines.machine(replace(SPECS["mi300x"], extra=files)).gpus
    assert [gpu.pci_bus_id[5:7] for gpu in gpus] == [bus for bus, _ in MI300X], "the PCI bus knows them"


def test_a_partition_has_a_name_that_finds_it() -> None:
    cpx = machines.machine("mi300x-cpx")
    assert find_gpu(cpx, "0000:26:00.0/3") == cpx.gpus[11]
    assert find_gpu(cpx, "0000:26:00.0") is None, "the address names eight of them"
    assert parse_saved(render_json(to_json(cpx)).encode(), "x").gpus == cpx.gpus


def test_each_rank_of_a_plan_finds_its_partition() -> None:
    cpx = machines.machine("mi300x-cpx")
    request = HostRequest(("t.py",), 16, 16, environ={})
    ranks = plan_host(cpx, request).ranks
    assert ranks[9].gpu is not None and ranks[9].gpu.address == "0000:26:00.0/1"
    for rank in ranks:
        assert rank.env["LMSRUN_GPUS"].split(",")[rank.local_rank] == str(rank.gpu and rank.gpu.index)
    hidden = plan_host(cpx, replace(request, local_world_size=2, environ={"ROCR_VISIBLE_DEVICES": "9,8"}))
    assert [rank.gpu.address for rank in hidden.ranks if rank.gpu] == ["0000:26:00.0/1", "0000:26:00.0/0"]
