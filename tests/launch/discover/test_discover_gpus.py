"""Which devices are GPUs, and where each hangs: traps 2 and 10."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import machines
import pytest
from machines import GpuSpec, MachineSpec, NodeSpec

from launch.discover import read_machine
from launch.discover.gpus import parse_pci_address, pci_order
from launch.discover.saved import from_json, to_json
from launch.model.settings import PlanSettings
from launch.plan_host.planner import HostRequest, plan_host

TWO = MachineSpec(
    nodes=(NodeSpec(0, "0-7", 0, machines.GIB), NodeSpec(8, "8-15", 1, machines.GIB)), architecture="x86_64"
)
AT = "0000:3b:00.0"


def place(gpu: GpuSpec, spec: MachineSpec = TWO) -> tuple[int | None, frozenset[int]]:
    (found,) = machines.machine(replace(spec, gpus=(gpu,))).gpus
    return found.numa_node, found.cpus


LOW, HIGH = frozenset(range(8)), frozenset(range(8, 16))


def test_ladder_numa_node_first() -> None:
    assert place(GpuSpec(AT, numa_node=8, local_cpus="0-7")) == (8, HIGH)


def test_ladder_minus_one_is_not_zero() -> None:
    assert place(GpuSpec(AT, numa_node=-1, local_cpus="8-15")) == (8, HIGH)


def test_ladder_a_node_that_does_not_exist() -> None:
    assert place(GpuSpec(AT, numa_node=5, local_cpus="8-11")) == (8, HIGH)


def test_ladder_bridge_above() -> None:
    assert place(GpuSpec(AT, numa_node=-1, local_cpus="0-15", bridge_numa_node=8)) == (8, HIGH)


def test_ladder_the_only_node() -> None:
    one = replace(TWO, nodes=TWO.nodes[:1])
    assert place(GpuSpec(AT, numa_node=-1), one) == (0, LOW)


def test_ladder_the_only_node_with_cpus() -> None:
    assert place(GpuSpec(AT, numa_node=-1), machines.SPECS["cxl"]) == (0, LOW)


def test_ladder_ends_with_unknown_and_says_so() -> None:
    spec = replace(TWO, gpus=(GpuSpec(AT, numa_node=-1, local_cpus="0-15"),))
    machine = machines.machine(spec)
    assert (machine.gpus[0].numa_node, machine.gpus[0].cpus) == (None, frozenset())
    assert machine.warnings == (f"GPU 0 ({AT}): its NUMA node is unknown; its rank is not bound to one",)


def test_cpus_of_a_package_are_kept_without_a_node() -> None:
    spec = machines.SPECS["dgx"]
    assert place(GpuSpec(AT, numa_node=-1, local_cpus="0-63,128-191"), spec)[0] is None
    assert len(place(GpuSpec(AT, numa_node=-1, local_cpus="0-63,128-191"), spec)[1]) == 128


def test_a_node_without_cpus_leads_to_its_nearest() -> None:
    """A GPU said to hang on its own memory's node."""
    far = {
        "sys/devices/system/node/node255/cpulist": "",
        "sys/devices/system/node/node255/distance": "80 40 10",
        "sys/devices/system/node/online": "0,8,255",
    }
    assert place(GpuSpec(AT, numa_node=255), replace(TWO, extra=far)) == (8, HIGH)


@pytest.mark.parametrize(
    ("gpu", "counts"),
    [
        (GpuSpec(AT, pci_class="0x030000"), True),
        (GpuSpec(AT, pci_class="0x030200"), True),
        (GpuSpec(AT, pci_class="0x040300"), False),  # its audio function
        (GpuSpec(AT, vendor="0x1002", pci_class="0x038000", device="0x740c"), True),  # MI250
        (GpuSpec(AT, vendor="0x1002", pci_class="0x120000", device="0x74a1"), True),  # MI300X
        (
            GpuSpec(AT, vendor="0x1002", pci_class="0x030000", device="0x515e"),
            False,
        ),  # ES1000 on server boards
        (GpuSpec(AT, vendor="0x1a03", pci_class="0x030000"), False),  # ASPEED BMC
        (GpuSpec(AT, vendor="0x8086", pci_class="0x030000"), False),
        (GpuSpec(AT, vendor=None, pci_class="0x030000"), False),
        (GpuSpec(AT, vendor=None, pci_class=None, in_driver=True), True),  # named by the driver's folder
    ],
)
def test_what_is_a_gpu(gpu: GpuSpec, counts: bool) -> None:
    assert len(machines.machine(replace(TWO, gpus=(gpu,))).gpus) == counts


def test_a_virtual_function_is_not_a_second_gpu() -> None:
    share = {f"sys/bus/pci/devices/{AT}/physfn/vendor": "0x10de"}
    assert machines.machine(replace(TWO, gpus=(GpuSpec(AT),), extra=share)).gpus == ()


def test_pci_order_is_numeric_and_domains_are_normalised() -> None:
    """Trap 10: nvidia-smi prints eight digits of the domain, sysfs four; 10000 sorts after ffff."""
    assert parse_pci_address("00000004:05:00.0") == "0004:05:00.0"
    assert parse_pci_address("0004:05:00.0") == parse_pci_address("0004:05:00.0\n") == "0004:05:00.0"
    assert parse_pci_address("00000000:B7:00.0") == "0000:b7:00.0"
    assert parse_pci_address("10000:01:00.0") == "10000:01:00.0"
    assert parse_pci_address("pci0000:00") is parse_pci_address("3b:00.0") is None
    found = ["10000:01:00.0", "0035:04:00.0", "0004:10:00.0", "0004:05:00.0"]
    assert sorted(found, key=pci_order) == found[::-1]
    spec = replace(TWO, gpus=tuple(GpuSpec(address) for address in found))
    assert [gpu.pci_bus_id for gpu in machines.machine(spec).gpus] == found[::-1]


def test_driver_folder_gives_name_and_uuid() -> None:
    gpu = machines.machine("dgx").gpus[2]
    assert (gpu.name, gpu.pci_bus_id, gpu.numa_node) == ("NVIDIA A100-SXM4-40GB", "0000:47:00.0", 1)
    assert gpu.uuid == "GPU-00000002-0000-4000-8000-000000000002"
    unknown = GpuSpec(AT, in_driver=True)
    assert machines.machine(replace(TWO, gpus=(unknown,))).gpus[0].uuid is None


def test_amdgpu_files() -> None:
    at = f"sys/bus/pci/devices/{AT}"
    told = {
        f"{at}/mem_info_vram_total": "68702699520",
        f"{at}/unique_id": "81f3c8a2",
        f"{at}/product_name": "MI210",
    }
    gpu = GpuSpec(AT, vendor="0x1002", pci_class="0x038000", numa_node=8)
    (found,) = machines.machine(replace(TWO, gpus=(gpu,), extra=told)).gpus
    assert (found.vendor, found.name, found.uuid, found.memory_bytes) == (
        "amd",
        "MI210",
        "GPU-81f3c8a2",
        68702699520,
    )


class NvmlError(Exception):
    pass


class Nvml:
    """NVML's functions over a table of GPUs; a missing entry is "not supported"."""

    NVMLError = NvmlError

    def __init__(self, *gpus: dict[str, Any], init_fails: bool = False) -> None:
        self.gpus, self.init_fails, self.shut = gpus, init_fails, 0
        self.shutdown_fails = False

    def nvmlInit(self) -> None:  # noqa: N802
        if self.init_fails:
            raise NvmlError("Driver/library version mismatch")

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.shut += 1
        if self.shutdown_fails:
            raise NvmlError("GPU is lost")

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> dict[str, Any]:  # noqa: N802
        if "lost" in self.gpus[index]:
            raise NvmlError("GPU is lost")
        return self.gpus[index]

    def nvmlDeviceGetPciInfo(self, handle: dict[str, Any]) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(busId=handle["bus"])

    def nvmlDeviceGetName(self, handle: dict[str, Any]) -> bytes | str:  # noqa: N802
        return self._get(handle, "name")

    def nvmlDeviceGetUUID(self, handle: dict[str, Any]) -> str:  # noqa: N802
        return self._get(handle, "uuid")

    def nvmlDeviceGetMemoryInfo(self, handle: dict[str, Any]) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(total=self._get(handle, "memory"))

    def nvmlDeviceGetCpuAffinity(self, handle: dict[str, Any], words: int) -> list[int]:  # noqa: N802
        return self._get(handle, "affinity")[:words]

    def nvmlDeviceGetMigMode(self, handle: dict[str, Any]) -> list[int]:  # noqa: N802
        return self._get(handle, "mig")

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: dict[str, Any]) -> int:  # noqa: N802
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: dict[str, Any], index: int) -> Any:  # noqa: N802
        parts = self._get(handle, "parts")
        if index >= len(parts):
            raise NvmlError("Not Found")
        return parts[index]

    def _get(self, handle: dict[str, Any], key: str) -> Any:
        if key not in handle:
            raise NvmlError("Not Supported")
        return handle[key]


def test_nvml_first_and_its_affinity_places_a_gpu(tmp_path: Path) -> None:
    root = machines.build_root(replace(TWO, gpus=(GpuSpec(AT, numa_node=-1, local_cpus="0-15"),)), tmp_path)
    nvml = Nvml(
        {
            "bus": b"00000000:D8:00.0",
            "name": b"Tesla V100",
            "uuid": "GPU-b",
            "memory": 1 << 34,
            "mig": [0, 0],
        },
        {"bus": "00000000:3B:00.0", "name": "A100", "uuid": "GPU-a", "affinity": [0xFF00], "mig": [0, 1]},
    )
    machine = read_machine(root=str(root), nvml=nvml)
    assert [(g.index, g.pci_bus_id, g.name, g.uuid, g.memory_bytes, g.numa_node) for g in machine.gpus] == [
        (0, AT, "A100", "GPU-a", None, 8),
        (1, "0000:d8:00.0", "Tesla V100", "GPU-b", 1 << 34, None),
    ]
    assert nvml.shut == 1


def test_mig_devices_are_gpus_of_their_own(tmp_path: Path) -> None:
    root = machines.build_root(replace(TWO, gpus=(GpuSpec(AT, numa_node=0),)), tmp_path)
    parts = [{"uuid": f"MIG-{name}", "memory": 1 << 28} for name in "ab"]
    nvml = Nvml(
        {"bus": AT, "name": "A100", "uuid": "GPU-a", "memory": 40 << 30, "mig": [1, 1], "parts": parts},
        {"bus": "0000:d8:00.0", "name": "A100", "uuid": "GPU-b", "mig": [1, 1], "parts": []},
    )
    machine = read_machine(root=str(root), nvml=nvml)
    assert [(g.index, g.pci_bus_id, g.uuid, g.memory_bytes, g.numa_node) for g in machine.gpus] == [
        (0, AT, "MIG-a", 1 << 28, 0),
        (1, AT, "MIG-b", 1 << 28, 0),
    ]
    assert machine.warnings == ("GPU 0000:d8:00.0 is in MIG mode without a MIG device: it is left out",)
    assert from_json(json.loads(json.dumps(to_json(machine)))).gpus == machine.gpus
    ranks = plan_host(machine, HostRequest(("t.py",), 2, 2)).ranks
    assert [rank.env["CUDA_VISIBLE_DEVICES"] for rank in ranks] == ["MIG-a", "MIG-b"]
    second = HostRequest(("t.py",), 1, 1, settings=PlanSettings(gpus="MIG-b"))
    assert [rank.gpu for rank in plan_host(machine, second).ranks] == [machine.gpus[1]]


def test_one_lost_gpu_does_not_hide_the_others(tmp_path: Path) -> None:
    root = machines.build_root(replace(TWO, gpus=(GpuSpec(AT, numa_node=0),)), tmp_path)
    machine = read_machine(root=str(root), nvml=Nvml({"lost": True}, {"bus": AT}))
    assert [gpu.pci_bus_id for gpu in machine.gpus] == [AT]
    assert machine.warnings == ("NVML cannot read GPU 0 (GPU is lost): it is left out",)


def test_nvml_that_fails_falls_back(tmp_path: Path) -> None:
    root = machines.build_root(
        replace(TWO, gpus=(GpuSpec(AT, numa_node=0, in_driver=True, name="P100"),)), tmp_path
    )
    machine = read_machine(root=str(root), nvml=Nvml(init_fails=True))
    assert [gpu.name for gpu in machine.gpus] == ["P100"]
    assert machine.warnings[0].startswith("NVML does not work here (Driver/library version mismatch)")


def test_nvml_that_fails_at_the_end_has_answered(tmp_path: Path) -> None:
    nvml = Nvml({"bus": AT})
    nvml.shutdown_fails = True
    machine = read_machine(root=str(machines.build_root(TWO, tmp_path)), nvml=nvml)
    assert [gpu.pci_bus_id for gpu in machine.gpus] == [AT]


def test_nvml_takes_the_memory_size_from_the_driver_where_it_has_none(tmp_path: Path) -> None:
    root = machines.build_root("ac922", tmp_path)
    nvml = Nvml(*({"bus": gpu.address, "memory": 0} for gpu in machines.SPECS["ac922"].gpus))
    machine = read_machine(root=str(root), nvml=nvml)
    assert {gpu.memory_bytes for gpu in machine.gpus} == {16 * machines.GIB}
    assert {node.id for node in machine.numa_nodes if node.kind == "gpu"} == set(range(252, 256))
