"""What the guest's kernel says of itself, read without the code under test."""

import json
from pathlib import Path

NODES, CPUS, PCI = (
    Path("/sys", *parts)
    for parts in (("devices/system/node",), ("devices/system/cpu",), ("bus/pci/devices",))
)


def text(path: Path) -> str:
    return path.read_text().strip()


def memory(node: Path) -> int:
    (line,) = (line for line in text(node / "meminfo").splitlines() if "MemTotal:" in line)
    return int(line.split()[3]) * 1024


print(
    json.dumps(
        {
            "nodes": {
                node.name.removeprefix("node"): [text(node / "cpulist"), memory(node)]
                for node in NODES.glob("node[0-9]*")
            },
            "cores": sorted(
                {
                    text(cpu / "topology/thread_siblings_list")
                    for cpu in CPUS.glob("cpu[0-9]*")
                    if (cpu / "topology").exists()
                }
            ),
            "packages": sorted(
                {
                    int(text(cpu / "topology/physical_package_id"))
                    for cpu in CPUS.glob("cpu[0-9]*")
                    if (cpu / "topology").exists()
                }
            ),
            "gpus": {
                device.name: int(text(device / "numa_node"))
                for device in PCI.iterdir()
                if text(device / "vendor") == "0x10de"
            },
        }
    )
)
