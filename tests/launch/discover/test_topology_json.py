"""Our JSON: the fixed schema, and an exact round trip of any machine."""

import json
from pathlib import Path

import machines
import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.discover import read_machine
from launch.discover.saved import from_json, to_json
from launch.model.topology import Allowed, Core, Gpu, Limits, Machine, NumaNode, Package
from lmsrun.render.topology import render_tree

sizes = st.none() | st.integers(0, 1 << 60)


@st.composite
def any_machine(draw: st.DrawFn) -> Machine:
    """A machine that keeps every promise, with sparse ids and unknowns."""
    ids = sorted(draw(st.sets(st.integers(0, 4000), min_size=1, max_size=12)))
    groups = [frozenset(ids[at : at + 2]) for at in range(0, len(ids), 2)]
    node_ids = draw(st.lists(st.integers(0, 300), min_size=1, max_size=4, unique=True).map(sorted))
    package = draw(st.none() | st.integers(0, 9))
    nodes = tuple(
        NumaNode(
            node,
            package if position == 0 else None,
            frozenset(ids) if position == 0 else frozenset(),
            draw(sizes),
            "dram" if position == 0 else draw(st.sampled_from(["gpu", "memory-only"])),
            tuple((other, draw(st.integers(10, 255))) for other in node_ids) if draw(st.booleans()) else (),
        )
        for position, node in enumerate(node_ids)
    )
    addresses = sorted(draw(st.sets(st.integers(0, 0xFFFF), max_size=3)))
    gpus = tuple(
        Gpu(
            index,
            f"{address:04x}:05:00.0",
            draw(st.none() | st.text(max_size=20)),
            draw(st.none() | st.text(max_size=20)),
            draw(st.none() | st.sampled_from(node_ids)),
            draw(st.sampled_from(groups)) if draw(st.booleans()) else frozenset(),
            draw(sizes),
            draw(st.sampled_from([None, "nvidia", "amd"])),
        )
        for index, address in enumerate(addresses)
    )
    return Machine(
        source=draw(st.text(max_size=20)),
        architecture="x86_64",
        packages=() if package is None else (Package(package, frozenset(ids), (node_ids[0],)),),
        numa_nodes=nodes,
        cores=tuple(Core(package, draw(st.none() | st.just(node_ids[0])), cpus) for cpus in groups),
        gpus=gpus,
        allowed=Allowed(draw(st.sampled_from(groups)), frozenset(node_ids[:1])),
        limits=Limits(draw(sizes), draw(sizes), draw(st.none() | st.booleans()), draw(sizes)),
        warnings=tuple(draw(st.lists(st.text(max_size=20), max_size=2))),
    )


@given(any_machine())
def test_round_trip_is_exact(machine: Machine) -> None:
    assert from_json(json.loads(json.dumps(to_json(machine)))) == machine
    render_tree(machine)


def test_the_fixed_schema(topologies: Path) -> None:
    """The names and forms that outside tools read."""
    table = to_json(read_machine(str(topologies / "ac922-6gpu-power9.tar.bz2")))
    assert table["schema"] == "lmsrun.topology/1"
    assert table["packages"][0] == {"id": 0, "cpus": "0-15", "numa_nodes": [0]}
    node = {key: value for key, value in table["numa_nodes"][-1].items() if key != "distances"}
    assert node == {"id": 255, "package": None, "cpus": "", "memory_bytes": 16106127360, "kind": "gpu"}
    assert table["cores"][0] == {"package": 0, "numa_node": 0, "cpus": "0-3"}
    assert table["gpus"][0] == {
        "index": 0,
        "pci_bus_id": "0004:05:00.0",
        "name": None,
        "uuid": None,
        "numa_node": 0,
        "cpus": "0-15",
        "memory_bytes": 16911433728,
        "vendor": "nvidia",
    }
    assert table["allowed"] == {"cpus": "0-15,88-103", "mems": "0,8"}
    assert list(table) == [
        "schema", "source", "architecture", "packages", "numa_nodes", "cores", "gpus", "allowed",
        "limits", "warnings",
    ]  # fmt: skip


@pytest.mark.parametrize("name", machines.SPECS)
def test_every_synthetic_machine_makes_the_round_trip(name: str) -> None:
    machine = machines.machine(name)
    assert from_json(to_json(machine)) == machine


def test_null_is_unknown_for_the_cpus_of_a_gpu_too() -> None:
    table = to_json(machines.machine("ac922"))
    table["gpus"][0]["cpus"] = None
    assert from_json(table).gpus[0].cpus == frozenset()


def test_tree_for_people() -> None:
    machine = machines.with_gpu_memory(machines.machine("cpuset"), 40 << 30)
    assert render_tree(machine).splitlines() == [
        "cpuset: x86_64, 2 sockets, 2 NUMA nodes, 16 cores, 32 CPUs, 2 GPUs",
        "├── socket 0: CPUs 0-15",
        "│   └── NUMA node 0: CPUs 0-15 (8 cores), 64.0 GiB",
        "│       └── GPU 0: 0000:3b:00.0, nvidia, 40.0 GiB",
        "├── socket 1: CPUs 16-31",
        "│   └── NUMA node 1: CPUs 16-31 (8 cores), 64.0 GiB",
        "│       └── GPU 1: 0000:d8:00.0, nvidia, 40.0 GiB",
        "├── this process may use CPUs 18-29 and memory of NUMA node 1",
        "└── limits: 24.0 GiB by its cgroup",
    ]


def test_tree_shows_what_belongs_nowhere() -> None:
    text = render_tree(machines.machine("unknown-node"))
    assert "├── GPU 0: 0000:3b:00.0, nvidia, memory unknown, NUMA node unknown" in text
    assert text.endswith("GPU 1 (0000:d8:00.0): its NUMA node is unknown; its rank is not bound to one")
    assert "NUMA node 1: 96.0 GiB (a GPU's memory)" in render_tree(machines.machine("gh200"))


def test_tree_carries_no_escape_sequences() -> None:
    machine = from_json({**to_json(machines.machine("single")), "source": "\x1b[2Jx", "warnings": ["a\nb"]})
    assert "\x1b" not in render_tree(machine)
    assert "warning: a?b" in render_tree(machine)
