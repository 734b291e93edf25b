"""Small files that describe enormous machines are refused before they cost much; large machines are read."""

import bz2
import gzip
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import machines
import pytest

from launch.discover.saved import to_json
from launch.model.errors import TopologyError
from launch.model.idset import MAX_ID, IdParser
from launch.model.topology import MAX_GPUS, MAX_NUMA_NODES

ENTRY = Path(__file__).resolve().parents[3] / "lmsrun" / "__main__.py"
MAX_SECONDS, MAX_MEMORY_KIB = 5.0, 200 << 10
"""One second is promised, on a core of one's own: here others may run, and a core's time is shared, too."""
CPU, NODE, PCI = "sys/devices/system/cpu", "sys/devices/system/node", "sys/bus/pci/devices"
ALL = f"0-{MAX_ID - 1}"


# A process that is started counts the memory of the one that it was forked from: this one stands between.
WEIGH = """
import os, sys
pid = os.posix_spawn(sys.executable, [sys.executable, *sys.argv[1:]], os.environ)
_, status, used = os.wait4(pid, 0)
print(os.waitstatus_to_exitcode(status), used.ru_maxrss, used.ru_utime + used.ru_stime)
"""


def weigh_topo(path: Path) -> tuple[int, str, float]:
    """Run ``lmsrun topo``; the seconds that it cost are looked up in the kernel's own books."""
    done = subprocess.run(
        [sys.executable, "-S", "-c", WEIGH, str(ENTRY), "topo", "--topology", str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=True,
    )
    *said, told = done.stdout.splitlines()
    code, memory_kib, used_s = told.split()
    assert int(memory_kib) < MAX_MEMORY_KIB
    return int(code), "\n".join(said), float(used_s)


def topo(path: Path) -> tuple[int, str]:
    """Run ``lmsrun topo`` within the limits of memory and time."""
    code, said, used_s = weigh_topo(path)
    assert used_s < MAX_SECONDS
    return code, said


def header(name: str, size: int, kind: bytes = b"0", target: str = "") -> bytes:
    """A tar header of the simplest form; ``tarfile`` takes a minute for the archives below."""
    block = bytearray(512)
    block[: len(name)], block[124:135], block[156:157] = name.encode(), b"%011o" % size, kind
    block[157 : 157 + len(target)], block[257:265] = target.encode(), b"ustar\00000"
    block[148:155] = b"%06o\0" % (sum(block) + 8 * 32)
    block[155] = 32
    return bytes(block)


def tar(files: Mapping[str, str], links: Mapping[str, str] | None = None) -> bytes:
    pieces = []
    for path, text in {f"{CPU}/online": ALL, **files}.items():
        if len(path) > 100:
            pieces += [header("long", len(path), b"L"), path.encode(), bytes(-len(path) % 512)]
        pieces += [header(path[:100], len(text)), text.encode(), bytes(-len(text) % 512)]
    pieces += [header(path, 0, b"2", target) for path, target in (links or {}).items()]
    return b"".join((*pieces, bytes(1024)))


def archive(files: Mapping[str, str], links: Mapping[str, str] | None = None) -> bytes:
    return gzip.compress(tar(files, links), compresslevel=1)


def table(**fields: Any) -> bytes:
    known = to_json(machines.machine("single"))
    return json.dumps({**known, **fields}).encode()


def xml(inside: str, attributes: str = "") -> bytes:
    pu = '<object type="PU" os_index="0"/>'
    return (
        f'<topology><object type="Machine" online_cpuset="0x1" {attributes}>{pu}{inside}</object></topology>'
    ).encode()


DEVICE = '<object type="PCIDev" pci_busid="0000:00:00.0" pci_type="0300 [10de:0000]">'
GPU_FILES = (("vendor", "0x10de"), ("class", "0x030000"))
NUMBERS = "1 " * 4_000_000
MASK = ",".join(["ffffffff"] * 2047)
BOMBS: dict[str, tuple[Callable[[], bytes], str]] = {
    "a name of many folders": (
        lambda: bz2.compress(tar({f"{CPU}/{'a/' * 50_000}x": ""})),
        "folders at most",
    ),
    "many members": (lambda: archive({f"{CPU}/f{each}": "" for each in range(160_000)}), "members"),
    "zeros": (
        lambda: archive({f"{CPU}/f{each}": "\0" * (1 << 20) for each in range(140)}),
        "unpacks to more than 128 MiB",
    ),
    "other siblings for each CPU": (
        lambda: archive(
            {
                f"{CPU}/online": "0-29999",
                **{
                    f"{CPU}/cpu{each}/topology/thread_siblings_list": f"30000-65535,{each}"
                    for each in range(20_000)
                },
            }
        ),
        "ids in all",
    ),
    "many nodes": (
        lambda: archive(
            {f"{NODE}/node0/distance": "10 " * 20_000},
            {f"{NODE}/node{each}/distance": "../node0/distance" for each in range(1, 20_000)},
        ),
        f"{MAX_NUMA_NODES} at most",
    ),
    "many GPUs": (
        lambda: archive(
            {f"{PCI}/{each:04x}:00:00.0/{name}": text for each in range(30_000) for name, text in GPU_FILES}
        ),
        f"{MAX_GPUS} GPUs",
    ),
    "GPUs near all CPUs": (
        lambda: archive(
            {
                **{f"{NODE}/node{each}/cpulist": f"{each * 128}-{each * 128 + 127}" for each in range(512)},
                **{
                    f"{PCI}/{each:04x}:00:00.0/{name}": text
                    for each in range(256)
                    for name, text in (*GPU_FILES, ("local_cpulist", "0-65534"))
                },
            }
        ),
        "ids in all",
    ),
    "JSON, all CPUs in each core": (
        lambda: table(cores=[{"cpus": f"{ALL},{each}"} for each in range(60_000)]),
        "ids in all",
    ),
    "JSON, many lists": (lambda: b'{"a":[' + b"[]," * 2_500_000 + b"[]]}", "lists"),
    "JSON, many keys": (
        lambda: b"{" + b",".join(b'"%06d":1' % each for each in range(1_060_000)) + b"}",
        "8388608 at most",
    ),
    "XML, many objects": (lambda: xml("<object/>" * 800_000), "elements"),
    "XML, many attributes": (
        lambda: xml("", " ".join(f'a{each:x}=""' for each in range(800_000))),
        "an element",
    ),
    "XML, many distances": (
        lambda: xml(
            f'</object><distances2 type="NUMANode" kind="5"><u64values>{NUMBERS}</u64values>'
            "</distances2><object>"
        ),
        "distances of more",
    ),
    "XML, all CPUs in each core": (
        lambda: xml("".join(f'<object type="Core" cpuset="0x{each:x},{MASK}"/>' for each in range(400))),
        "ids in all",
    ),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_one_line_and_costs_little(name: str, tmp_path: Path) -> None:
    build, reason = BOMBS[name]
    path = tmp_path / "bomb"
    path.write_bytes(build())
    code, said = topo(path)
    assert code == 2
    assert "\n" not in said
    assert "bomb" in said
    assert reason in said


@pytest.mark.parametrize(
    "inside",
    [
        DEVICE * 250 + '<object type="OSDev"/>' * 140_000 + "</object>" * 250,
        '<object type="Core" name="x" subtype="y" os_index="1"/>' * 149_000,
    ],
    ids=["devices in devices", "as many objects as are allowed"],
)
def test_what_is_just_allowed_costs_little_too(inside: str, tmp_path: Path) -> None:
    path = tmp_path / "machine.xml"
    path.write_bytes(xml(inside))
    assert topo(path)[0] == 0


def build_large(source: str, path: Path, cpus_per_node: int) -> None:
    """Write a machine of eight NUMA nodes in one of the forms that ``lmsrun topo`` reads."""
    spec = machines.MachineSpec(
        nodes=tuple(
            machines.NodeSpec(
                node, f"{node * cpus_per_node}-{(node + 1) * cpus_per_node - 1}", node // 2, 256 << 30
            )
            for node in range(8)
        )
    )
    if source == "json":
        path.write_text(json.dumps(to_json(machines.machine(spec))))
    elif source == "archive":
        path.write_bytes(archive(machines.build_files(spec)))
    else:
        machines.build_root(spec, path)


@pytest.mark.parametrize(("source", "cpus"), [("json", 60_000), ("archive", 60_000), ("folder", 15_000)])
def test_the_time_for_a_large_machine_grows_with_its_cpus(source: str, cpus: int, tmp_path: Path) -> None:
    """A quarter of the CPUs is the yardstick; how many seconds it takes, the measurements tell."""
    build_large(source, tmp_path / "whole", cpus // 8)
    build_large(source, tmp_path / "quarter", cpus // 32)
    code, said, used_s = weigh_topo(tmp_path / "whole")
    assert code == 0
    assert f"4 sockets, 8 NUMA nodes, {cpus} cores, {cpus} CPUs" in said
    assert used_s < 8 * weigh_topo(tmp_path / "quarter")[2]


def test_a_machine_of_a_socket_for_each_cpu(tmp_path: Path) -> None:
    """Nothing takes the product of sockets and nodes."""
    spec = machines.MachineSpec(
        nodes=tuple(
            machines.NodeSpec(node, f"{node * 40}-{node * 40 + 39}", 0, 1 << 30) for node in range(512)
        )
    )
    known = machines.machine(spec)
    saved = to_json(known)
    saved["packages"] = [{"id": cpu, "cpus": str(cpu), "numa_nodes": [cpu // 40]} for cpu in range(512 * 40)]
    saved["cores"] = [{"package": cpu, "numa_node": cpu // 40, "cpus": str(cpu)} for cpu in range(512 * 40)]
    for node in saved["numa_nodes"]:
        node["package"] = node["id"] * 40
    (tmp_path / "json").write_text(json.dumps(saved))
    assert topo(tmp_path / "json")[0] == 0


def test_one_parser_counts_every_set() -> None:
    parser = IdParser()
    assert parser.ids("0-3") is parser.ids("0-3")
    assert parser.mask("0xf") == {0, 1, 2, 3}
    with pytest.raises(TopologyError, match="ids in all"):
        for _ in range(65):
            parser.ids(ALL)
