"""The drawing of a machine: all of it is there, nothing is cut off, and no name breaks out of it."""

import json
import re
import shutil
import struct
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import machines
import pytest

from launch.discover import read_machine
from launch.discover.saved import to_json
from launch.model.busy import gpu_key
from launch.model.errors import UsageError
from launch.model.topology import Adapter, Gpu, Machine
from launch.receipts.judge import RankReceipt
from lms.page.svg import text_width
from lmsrun.cli import main
from lmsrun.draw.files import write_png
from lmsrun.draw.machine import draw_machine
from lmsrun.draw.marks import Mark, marks_from_json
from lmsrun.draw.plan import drawing_size

SVG = "{http://www.w3.org/2000/svg}"
SIZES = {"lm-title": 18, "lm-head": 14, "lm-small": 11, "lm-tiny": 10}


def parts(svg: str, name: str) -> list[ET.Element]:
    return list(ET.fromstring(svg).iter(SVG + name))  # noqa: S314 - our own


def texts(svg: str) -> str:
    return "\n".join(element.text or "" for element in parts(svg, "text"))


def cut_off(svg: str) -> list[str]:
    """What lies, as far as can be told without a font, beyond the edge of a drawing."""
    root = ET.fromstring(svg)  # noqa: S314 - our own
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    found = []
    for element in root.iter(SVG + "rect"):
        x, y, w, h = (float(element.attrib[name]) for name in ("x", "y", "width", "height"))
        if x < 0 or y < 0 or x + w > width + 0.5 or y + h > height + 0.5:
            found.append(f"rect {element.attrib}")
    for element in root.iter(SVG + "text"):
        text, x, y = element.text or "", float(element.attrib["x"]), float(element.attrib["y"])
        size = next((size for name, size in SIZES.items() if name in element.attrib["class"]), 12)
        long = text_width(text, size)
        left = {"end": x - long, "middle": x - long / 2}.get(element.attrib.get("text-anchor", ""), x)
        if left < -1 or left + long > width + 1 or y > height:
            found.append(text)
    return found


@pytest.mark.parametrize("name", [*machines.SPECS, "real ac922", "real power8", "example"])
def test_every_machine_is_drawn_whole(name: str, request: pytest.FixtureRequest) -> None:
    root = Path(__file__).resolve().parents[3]
    if name == "example":
        machine = read_machine(str(root / "examples" / "ac922.json"))
    elif name.startswith("real"):
        folder = request.getfixturevalue("topologies")
        files = {"ac922": "ac922-6gpu-power9.tar.bz2", "power8": "minsky-power8-4gpu.hwloc.xml"}
        machine = read_machine(str(folder / files[name.split()[1]]))
    else:
        machine = machines.machine(name)
    svg = draw_machine(machine)
    shown = texts(svg)
    assert cut_off(svg) == []
    for gpu in machine.gpus:
        assert f"GPU {gpu.index}  {gpu.pci_bus_id}" in shown
    for package in machine.packages:
        assert f"Socket {package.id}" in shown
    for node in machine.numa_nodes:
        assert node.package is None or f"NUMA node {node.id}:" in shown


def test_a_plan_shows_each_rank_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    machine = machines.with_gpu_memory(machines.machine("dgx"), 40 << 30)
    (tmp_path / "dgx.json").write_text(json.dumps(to_json(machine)))
    argv = [
        "plan",
        "--framework",
        "horovod",
        "-np",
        "8",
        "--topology",
        "dgx.json",
        "--svg",
        "plan.svg",
        "t.py",
    ]
    assert main(argv, {}) == 0
    svg = (tmp_path / "plan.svg").read_text()
    shown = texts(svg)
    assert cut_off(svg) == []
    assert "8 ranks on localhost" in shown
    for rank in range(8):
        assert f"rank {rank}" in shown
        assert shown.count(f"\nr{rank}\n") >= 8  # eight cores each
    tips = "\n".join(element.text or "" for element in parts(svg, "title"))
    assert "rank 0, CPUs 48-55,176-183, memory bind 0-3, GPU 0000:07:00.0" in tips
    described = next(iter(parts(svg, "desc"))).text or ""
    assert "NUMA node 3: CPUs 48-63,176-191, 128.0 GiB, 2 GPUs" in described


def test_hosts_stand_one_below_the_other_and_the_rest_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pc.json").write_text(json.dumps(to_json(machines.machine("single"))))
    hosts = ",".join(f"h{number}:2" for number in range(6))
    argv = ["plan", "--framework", "horovod", "-np", "12", "-H", hosts, "--launcher", "mpirun"]
    argv += ["--topology", "pc.json", "--svg", "plan.svg", "t.py"]
    assert main(argv, {"PATH": ""}) == 0
    svg = (tmp_path / "plan.svg").read_text()
    shown = texts(svg)
    assert "2 ranks on h3" in shown and "h4" not in shown
    assert "2 more hosts not drawn." in shown
    ids = re.findall(r' id="([^"]+)"', svg)
    assert len(ids) == len(set(ids))


def mark(state: str, found: set[int] | None, why: str = "") -> Mark:
    nodes = frozenset({0})
    is_at = None if found is None else frozenset(found)
    return Mark(0, "h", frozenset({0, 4}), nodes, "bind", None, None, is_at, state, why)  # type: ignore[arg-type]


def test_what_is_not_as_planned_stands_out() -> None:
    machine = machines.machine("single")
    good = draw_machine(machine, [mark("verified", {0, 4})])
    assert "is not here" not in good and "all of it was read back from the kernel as planned" in texts(good)
    assert "✓" not in good, "the sign stands on GPUs, and there are none"
    bad = draw_machine(machine, [mark("differs", {1, 5}, "on CPUs 1,5")])
    tips = "\n".join(element.text or "" for element in parts(bad, "title"))
    assert "rank 0 planned here; rank 0 is not here" in tips
    assert "rank 0 is here and not planned here" in tips
    assert "Rank 0 is not as planned: on CPUs 1,5." in texts(bad)


def test_many_cores_become_ranges() -> None:
    spec = replace(machines.SPECS["single"], nodes=(machines.NodeSpec(0, "0-255", 0, 1 << 36),), threads=1)
    svg = draw_machine(
        machines.machine(spec), [Mark(0, "h", frozenset(range(64)), frozenset({0}), "bind", None)]
    )
    assert "64 cores, CPUs 0-63" in texts(svg) and "192 cores, CPUs 64-255" in texts(svg)
    assert cut_off(svg) == []


HOSTILE = "</svg><script>alert('x')</script>&\x1b[31m\"'<!--" + "long" * 60


def test_no_name_breaks_out() -> None:
    machine = machines.machine("dgx")
    gpus = tuple(replace(gpu, name=HOSTILE, uuid=HOSTILE) for gpu in machine.gpus)
    odd = replace(
        machine,
        source=HOSTILE,
        warnings=(HOSTILE,) * 5,
        gpus=gpus,
        adapters=(Adapter(HOSTILE, 0), Adapter("a", None)),
    )
    svg = draw_machine(odd, [Mark(0, HOSTILE, frozenset({0}), frozenset({0}), HOSTILE, None)], title=HOSTILE)
    assert "<script" not in svg and "\x1b" not in svg
    assert cut_off(svg) == []
    assert "2 more warnings are left out." in texts(svg)


def test_a_machine_of_which_little_is_known_is_drawn() -> None:
    bare = Machine("?", "?", (), (), (), (), machines.machine("single").allowed)
    assert cut_off(draw_machine(bare)) == []


def test_a_png_needs_a_painter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "cairosvg", None)
    assert main(["topo", "--png", str(tmp_path / "a.png")], {"PATH": ""}) == 2
    assert (
        "install librsvg2-bin or chromium, or pip install 'cairosvg>=2.7', or take --svg"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("painter", ["rsvg-convert", "chromium", "cairosvg"])
def test_each_painter_makes_a_picture(painter: str, tmp_path: Path) -> None:
    path = shutil.which(painter)
    if painter == "cairosvg":
        pytest.importorskip("cairosvg")
    elif path is None:
        pytest.skip(f"{painter} is not installed")
    else:
        (tmp_path / painter).symlink_to(path)
    svg = draw_machine(machines.machine("ac922"))
    write_png(svg, str(tmp_path / "a.png"), "--png", {"PATH": str(tmp_path)})
    content = (tmp_path / "a.png").read_bytes()
    width, height = struct.unpack(">II", content[16:24])
    assert content.startswith(b"\x89PNG")
    assert (width / 2, height / 2) == pytest.approx(drawing_size(svg), abs=2)
    assert len(content) > 20_000  # A white one has 5 KB.


@pytest.mark.parametrize("argv", [["topo", "--svg", "none/a.svg"], ["topo", "--svg", "."]])
def test_a_file_that_cannot_be_written_is_named(
    argv: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(argv, {}) == 2
    assert f"cannot write {argv[2]}: " in capsys.readouterr().err


def test_a_run_draws_no_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-np", "2", "--svg", "a.svg", "t.py"], {}) == 2
    assert "--svg draws a plan; use `lmsrun plan --svg FILE`" in capsys.readouterr().err


def test_a_rank_that_was_verified_elsewhere_is_where_it_was_found() -> None:
    from lmsrun.draw.marks import with_receipts

    receipt = RankReceipt(0, 0, "h", None, 0, "1,5", "bind", "0", None, "graph", True, (), ("start",))
    (found,) = with_receipts([mark("planned", None)], [receipt])
    assert (found.cpus, found.found_cpus, found.state) == ({1, 5}, {1, 5}, "verified")


def test_a_partition_of_a_gpu_comes_back_from_the_plan() -> None:
    gpu = {"index": 1, "pci_bus_id": "0000:03:00.0", "uuid": None, "partition": 5}
    rank = {"rank": 0, "host": "h", "cpus": "0", "mem_nodes": "0", "mem_policy": "bind", "gpu": gpu}
    (found,) = marks_from_json([{**rank, "host_mem_limit_mb": None}])
    assert found.gpu == gpu_key(Gpu(1, "0000:03:00.0", partition=5))


@pytest.mark.parametrize(("user", "given"), [(0, True), (1000, False)])
def test_only_root_s_browser_runs_without_its_sandbox(
    user: int, given: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "chromium").write_text(f'#!/bin/sh\necho "$*" > {tmp_path}/argv; exit 1\n')
    (tmp_path / "chromium").chmod(0o755)
    monkeypatch.setattr("os.geteuid", lambda: user)
    with pytest.raises(UsageError):
        write_png(draw_machine(machines.machine("single")), "x.png", "--png", {"PATH": str(tmp_path)})
    assert ("--no-sandbox" in (tmp_path / "argv").read_text()) == given


def test_only_a_drawing_of_this_machine_speaks_of_this_process() -> None:
    machine = machines.machine("ac922")
    assert "This process may use" not in draw_machine(machine)
    assert "This process may use" in draw_machine(machine, is_here=True)


def test_receipts_colour_a_plan(tmp_path: Path) -> None:
    from launch.model.plan import LaunchPlan, RankPlan
    from lmsrun.draw.marks import mark_plan, with_receipts
    from lmsrun.draw.plan import draw_plan

    rank = RankPlan(0, 0, "h", None, 0, frozenset({0, 4}), "bind", frozenset({0}), 1024, {}, ("x",))
    receipt = RankReceipt(
        0, 0, "h", None, 0, "1,5", "bind", "0", 1024, "graph", False, ("on CPUs 1,5",), ("start",)
    )
    marks = with_receipts(mark_plan(LaunchPlan(1, "local", (rank,), (("x",),))), [receipt])
    svg = draw_plan(marks, {"h": machines.machine("single")})
    assert "Rank 0 is not as planned: on CPUs 1,5." in texts(svg)


def test_ranks_whose_part_of_memory_is_too_narrow_for_a_name_are_named_beside_it() -> None:
    machine = machines.machine("single")
    node = machine.numa_nodes[0]
    part = node.memory_bytes // 40
    marks = [
        Mark(rank, "h", node.cpus, frozenset({node.id}), f"rank {rank}", None, limit_bytes=part)
        for rank in range(100, 108)
    ]
    assert "memory: parts of ranks 100-107" in draw_machine(machine, marks)


def test_ranks_that_are_too_many_to_name_are_counted_and_the_count_explained() -> None:
    machine = machines.machine("single")
    node = machine.numa_nodes[0]
    marks = [
        Mark(rank, "h", node.cpus, frozenset({node.id}), "bind", None, limit_bytes=node.memory_bytes // 2000)
        for rank in range(0, 1500, 2)
    ]
    svg = draw_machine(machine, marks)
    assert "memory: parts of 750 ranks" in svg and "+2: two more ranks on the same core" in svg
    assert cut_off(svg) == []
