"""Every source of a topology, told apart by content; archives, XML and JSON are hostile until checked."""

import bz2
import gzip
import io
import json
import lzma
import os
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import machines
import pytest

from launch.discover import read_machine
from launch.discover.saved import to_json
from launch.model.errors import TopologyError
from launch.model.idset import format_ids


def refused(path: Path) -> str:
    with pytest.raises(TopologyError) as caught:
        read_machine(str(path))
    message = str(caught.value)
    assert str(path) in message
    assert "\n" not in message
    return message


def tar_of(*members: tuple[tarfile.TarInfo, bytes], of: str = "single") -> bytes:
    """An archive as hwloc-gather-topology makes it, with more members behind."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for path, text in machines.build_files(machines.SPECS[of]).items():
            info = tarfile.TarInfo(f"host/{path}")
            info.size = len(text.encode())
            archive.addfile(info, io.BytesIO(text.encode()))
        for info, content in members:
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "", size: int = 0) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size = kind, link, size
    return info


@pytest.mark.parametrize("pack", [bytes, gzip.compress, bz2.compress, lzma.compress])
def test_archives_of_any_compression(pack: Callable[[bytes], bytes], tmp_path: Path) -> None:
    path = tmp_path / "whatever.name"
    path.write_bytes(pack(tar_of(of="dgx")))
    assert replace(read_machine(str(path)), source="dgx") == machines.machine("dgx")


def test_links_inside_an_archive_are_followed(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    real = "host/sys/devices/pci0000:3b/0000:3b:00.0"
    link = member(
        "host/sys/bus/pci/devices/0000:3b:00.0", tarfile.SYMTYPE, "../../../devices/pci0000:3b/0000:3b:00.0"
    )
    again = member("host/sys/devices/copy", tarfile.LNKTYPE, "host/sys/devices/system/cpu/online")
    files = [(member(f"{real}/vendor", size=6), b"0x10de"), (member(f"{real}/class", size=8), b"0x030200")]
    path.write_bytes(tar_of((link, b""), *files, (again, b"")))
    assert [gpu.pci_bus_id for gpu in read_machine(str(path)).gpus] == ["0000:3b:00.0"]


@pytest.mark.parametrize(
    "evil",
    [
        member("../../etc/cron.d/x"),
        member("/etc/passwd"),
        member("host/../../x"),
        member("host/link", tarfile.SYMTYPE, "../../etc/passwd"),
        member("host/link", tarfile.SYMTYPE, "/etc/passwd"),
        member("host/link", tarfile.LNKTYPE, "../etc/passwd"),
        member("host/fifo", tarfile.FIFOTYPE),
        member("host/sda", tarfile.BLKTYPE),
        member("host/null", tarfile.CHRTYPE),
    ],
    ids=lambda info: f"{info.name}>{info.linkname}",
)
def test_archives_that_lead_outside(evil: tarfile.TarInfo, tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(tar_of((evil, b"")))
    assert "outside" in refused(path) or "device or pipe" in refused(path)
    assert sorted(os.listdir(tmp_path)) == ["a.tar"]


def test_link_loops_end(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    loop = member("host/sys/bus/pci/devices/0000:01:00.0", tarfile.SYMTYPE, "0000:01:00.0")
    path.write_bytes(tar_of((loop, b"")))
    assert read_machine(str(path)).gpus == ()


def test_archive_with_a_huge_member(tmp_path: Path) -> None:
    path = tmp_path / "a.tar.gz"
    path.write_bytes(gzip.compress(tar_of((member("host/big", size=2 << 20), bytes(2 << 20)))))
    assert "2097152 bytes" in refused(path)


def test_members_that_claim_more_than_is_there(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(tar_of((member("host/sparse", tarfile.GNUTYPE_SPARSE), b"")))
    assert "a device or pipe or sparse file" in refused(path)


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress])
@pytest.mark.parametrize("cut", [20, 400])
def test_truncated_and_damaged_archives(pack: Callable[[bytes], bytes], cut: int, tmp_path: Path) -> None:
    path = tmp_path / "a.tar.x"
    whole = pack(tar_of())
    path.write_bytes(whole[:cut])
    assert "damaged archive" in refused(path)
    path.write_bytes(whole[:cut] + bytes(64) + whole[cut + 64 :])
    refused(path)


def test_archive_of_something_else(tmp_path: Path) -> None:
    path = tmp_path / "a.tar.gz"
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        archive.addfile(member("photos/cat.jpg"))
    path.write_bytes(buffer.getvalue())
    assert "holds no sys/devices/system/cpu" in refused(path)


def test_sources_that_are_none(tmp_path: Path) -> None:
    assert "No such file" in refused(tmp_path / "missing")
    assert "holds no sys/devices/system/cpu" in refused(tmp_path)
    empty = tmp_path / "empty"
    empty.write_bytes(b"")
    assert "is no topology; needed" in refused(empty)
    (tmp_path / "yaml").write_text("gpus: 4\n")
    assert "is no topology; needed" in refused(tmp_path / "yaml")
    os.mkfifo(tmp_path / "fifo")
    assert "not a regular file" in refused(tmp_path / "fifo")
    with pytest.raises(TopologyError, match="null byte"):
        read_machine("a\0b")


def test_real_power8_xml(topologies: Path) -> None:
    machine = read_machine(str(topologies / "minsky-power8-4gpu.hwloc.xml"))
    assert machine.architecture == "ppc64le"
    assert [
        (n.id, n.package, format_ids(n.cpus), n.memory_bytes, n.distances) for n in machine.numa_nodes
    ] == [
        (0, 0, "0-1,8-9,16-17,24-25", 68556816384, ((0, 10), (1, 40))),
        (1, 1, "80-81,88-89,96-97,104-105", 68450713600, ((0, 40), (1, 10))),
    ]
    assert [format_ids(core.cpus) for core in machine.cores][3:5] == ["24-25", "80-81"]
    assert [(g.pci_bus_id, g.numa_node, g.name, g.memory_bytes) for g in machine.gpus] == [
        (address, node, "Tesla P100-SXM2-16GB", 16671616 * 1024)
        for address, node in (
            ("0002:01:00.0", 0),
            ("0003:01:00.0", 0),
            ("000a:01:00.0", 1),
            ("000b:01:00.0", 1),
        )
    ]
    assert machine.gpus[0].uuid == "GPU-77bf6b9a-6906-5a93-d28b-b77d2c23d1d2"
    assert (len(machine.allowed.cpus), machine.allowed.mems) == (16, {0, 1})


# Wide lines, as lstopo writes them.
# ruff: noqa: E501
V1 = """<?xml version="1.0" encoding="UTF-8"?>
<!DOCTYPE topology SYSTEM "hwloc.dtd">
<topology>
  <object type="Machine" os_index="0" cpuset="0x0000000f" online_cpuset="0x0000000f" allowed_cpuset="0x0000000e"
          allowed_nodeset="0x00000001">
    <info name="Architecture" value="x86_64"/>
    <object type="NUMANode" os_index="0" cpuset="0x00000003" nodeset="0x1" local_memory="1073741824">
      <object type="Socket" os_index="0" cpuset="0x00000003">
        <object type="Core" os_index="0" cpuset="0x00000003">
          <object type="PU" os_index="0" cpuset="0x1"/><object type="PU" os_index="1" cpuset="0x2"/>
        </object>
      </object>
      <object type="Bridge" os_index="0" bridge_type="0-1" depth="0" bridge_pci="0000:[00-3f]">
        <object type="PCIDev" os_index="4096" pci_busid="0000:03:00.0" pci_type="0300 [1a03:2000] [0000:0000] 41">
          <object type="OSDev" name="card0" osdev_type="1"/>
        </object>
        <object type="PCIDev" os_index="8192" pci_busid="0000:3B:00.0" pci_type="0302 [10de:102d] [10de:106c] a1">
          <object type="OSDev" name="cuda0" osdev_type="5"><info name="CUDAGlobalMemorySize" value="11796480"/></object>
        </object>
      </object>
    </object>
    <object type="NUMANode" os_index="1" cpuset="0x0000000c" nodeset="0x2" local_memory="1073741824">
      <object type="Socket" os_index="1" cpuset="0x0000000c">
        <object type="Core" os_index="0" cpuset="0x4"><object type="PU" os_index="2" cpuset="0x4"/></object>
        <object type="Core" os_index="1" cpuset="0x8"><object type="PU" os_index="3" cpuset="0x8"/></object>
      </object>
    </object>
    <object type="PCIDev" os_index="12288" pci_busid="0000:5e:00.0" pci_type="1200 [1234:5678] [0000:0000] 00">
      <object type="OSDev" name="nvml1" osdev_type="1"/>
    </object>
  </object>
</topology>
"""


def xml(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "machine.xml"
    path.write_text(text)
    return path


def test_version_1_xml(tmp_path: Path) -> None:
    machine = read_machine(str(xml(tmp_path, V1)))
    assert [(n.id, n.package, format_ids(n.cpus), n.kind) for n in machine.numa_nodes] == [
        (0, 0, "0-1", "dram"),
        (1, 1, "2-3", "dram"),
    ]
    assert [(c.package, c.numa_node, format_ids(c.cpus)) for c in machine.cores] == [
        (0, 0, "0-1"),
        (1, 1, "2"),
        (1, 1, "3"),
    ]
    assert [(g.pci_bus_id, g.numa_node, g.memory_bytes, g.vendor) for g in machine.gpus] == [
        ("0000:3b:00.0", 0, 11796480 * 1024, "nvidia"),
        ("0000:5e:00.0", None, None, None),  # a GPU by its OS device; on the machine, so its node is unknown
    ]
    assert (machine.allowed.cpus, machine.allowed.mems) == ({1, 2, 3}, {0})
    assert "0000:5e:00.0" in machine.warnings[0]


V2_GPU_MEMORY = """<?xml version="1.0"?>
<topology version="2.0">
  <object type="Machine" os_index="0" cpuset="0xf" allowed_cpuset="0xf" allowed_nodeset="0xf...f">
    <object type="Package" os_index="0" cpuset="0xf" nodeset="0x101">
      <object type="NUMANode" os_index="0" cpuset="0xf" nodeset="0x1" local_memory="4096"/>
      <object type="NUMANode" os_index="255" subtype="GPUMemory" cpuset="0xf" nodeset="0x2" local_memory="8192"/>
      <object type="NUMANode" os_index="9" cpuset="0xf" nodeset="0x3" local_memory="512"/>
      <object type="PU" os_index="0" cpuset="0x1"/><object type="PU" os_index="1" cpuset="0x2"/>
    </object>
  </object>
</topology>"""


def test_memory_beside_dram_in_xml(tmp_path: Path) -> None:
    """To HBM, CXL and GPU memory hwloc gives the CPUs near them; that makes no host memory of them."""
    machine = read_machine(str(xml(tmp_path, V2_GPU_MEMORY)))
    assert [(n.id, n.kind, format_ids(n.cpus)) for n in machine.numa_nodes] == [
        (0, "dram", "0-1"),
        (9, "memory-only", ""),
        (255, "gpu", ""),
    ]
    assert [format_ids(core.cpus) for core in machine.cores] == ["0", "1"]
    assert machine.allowed.mems == {0}


def test_an_old_hwloc_does_not_tell_gpu_memory_on_power(tmp_path: Path) -> None:
    """On POWER with NVIDIA's GPUs the kernel's files and lstopo's XML of one machine say the same."""
    gpu = (
        '<info name="Architecture" value="ppc64le"/>'
        '<object type="PCIDev" pci_busid="0004:04:00.0" pci_type="0302 [10de:1db1] [0000:0000] a1"/>'
    )
    text = V2_GPU_MEMORY.replace(' subtype="GPUMemory"', "").replace(
        '<object type="Package"', f'{gpu}<object type="Package"'
    )
    kinds = [(node.id, node.kind) for node in read_machine(str(xml(tmp_path, text))).numa_nodes]
    assert kinds == [(0, "dram"), (9, "gpu"), (255, "gpu")]
    elsewhere = text.replace("ppc64le", "x86_64")
    assert read_machine(str(xml(tmp_path, elsewhere))).numa_nodes[2].kind == "memory-only"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('<!DOCTYPE t [<!ENTITY a "b"><!ENTITY c "&a;&a;">]><topology/>', "entity 'a'"),
        ('<!DOCTYPE t [<!ENTITY x SYSTEM "file:///etc/passwd">]><topology>&x;</topology>', "entity 'x'"),
        ('<!DOCTYPE t [<!ENTITY % p SYSTEM "http://127.0.0.1/x">%p;]><topology/>', "entity 'p'"),
        ("<topology>" + '<object type="Group">' * 300, "levels"),
        ("<topology><object type='Machine'>", "damaged XML"),
        ("<topology></topology>", "no topology in it"),
        ("<svg><object type='Machine'/></svg>", "no topology in it"),
        ("<topology><object type='Machine' cpuset='0x1'/></topology>", "no online PU"),
        (V1.replace('cpuset="0x1"', 'cpuset="spam"').replace('"0x00000003"', '"spam"'), "damaged XML"),
    ],
)
def test_hostile_xml(text: str, reason: str, tmp_path: Path) -> None:
    path = xml(tmp_path, text)
    assert reason in refused(path)


def saved(tmp_path: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    table = to_json(machines.machine("ac922"))
    change(table)
    path = tmp_path / "saved.json"
    path.write_text(json.dumps(table))
    return path


def test_our_json_is_replayed(tmp_path: Path) -> None:
    assert read_machine(str(saved(tmp_path, lambda table: None))) == machines.machine("ac922")


def test_json_by_hand_may_leave_out_what_was_added_later(tmp_path: Path) -> None:
    def strip(table: dict[str, Any]) -> None:
        del table["limits"], table["warnings"]
        for node in table["numa_nodes"]:
            del node["distances"]
        for gpu in table["gpus"]:
            del gpu["vendor"]

    assert len(read_machine(str(saved(tmp_path, strip))).gpus) == 4


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda t: t.update(schema="lmsrun.topology/9"), "needed 'lmsrun.topology/1'"),
        (lambda t: t.pop("architecture"), "architecture is 'None'"),
        (lambda t: t.update(gpus=None), "gpus is 'None'; needed a list"),
        (lambda t: t.update(gpus=[1]), "needed a list of objects"),
        (lambda t: t["gpus"][1].update(pci_bus_id="x"), "GPU 1 has the PCI address 'x'"),
        (lambda t: t["gpus"].reverse(), "indexes of gpus"),
        (lambda t: t["gpus"][1].update(numa_node=7), "gpus name NUMA node 7"),
        (lambda t: t["gpus"][1].update(memory_bytes=True), "gpus[1]: memory_bytes is 'True'"),
        (lambda t: t["gpus"][1].update(memory_bytes=-1), "gpus[1]: memory_bytes is '-1'"),
        (lambda t: t["cores"][0].update(cpus="0-7"), "CPU 4 is listed 2 times in cores"),
        (lambda t: t["cores"][0].update(cpus="0-9999999"), "cores[0]: cpus: not a possible id range"),
        (lambda t: t["cores"].clear(), "no core has an online CPU"),
        (lambda t: t["allowed"].update(cpus="500"), "allowed name CPU 500"),
        (lambda t: t["allowed"].update(mems="3"), "allowed name NUMA node 3"),
        (lambda t: t["numa_nodes"][0].update(kind="hbm"), "numa_nodes[0]: kind is 'hbm'; needed one of dram"),
        (lambda t: t["numa_nodes"][0].update(kind=[]), "numa_nodes[0]: kind is"),
        (lambda t: t["numa_nodes"][0].update(package=3), "package 3 is named"),
        (lambda t: t["numa_nodes"][0].update(distances={"x": 1}), "needed node ids"),
        (lambda t: t["packages"].append(t["packages"][0]), "package 0 is listed 2 times"),
        (lambda t: t["packages"][0].update(numa_nodes="0"), "packages[0]: numa_nodes is '0'; needed a list"),
        (lambda t: t["limits"].update(set_mempolicy=1), "set_mempolicy is '1'"),
    ],
)
def test_json_that_lies(change: Callable[[dict[str, Any]], object], reason: str, tmp_path: Path) -> None:
    assert reason in refused(saved(tmp_path, change))


@pytest.mark.parametrize("text", ['{"schema":', '{"a":' * 100_000, "{\x00}"])
def test_json_that_is_none(text: str, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    assert "is not JSON" in refused(path)
