"""Whole `lmsrun plan` commands, on real and synthetic machines, against golden text."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import machines
import pytest

from launch.discover.saved import to_json
from launch.model.plan import SHIM
from lmsrun.cli import main

Golden = Callable[[str, str], None]
GIB = 1 << 30


@pytest.fixture
def plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """Run `lmsrun plan` in an empty folder and environment; what differs between machines is named."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")

    def run(*argv: str) -> str:
        # What `auto` takes depends on what is installed here.
        assert main(["plan", "--framework", "horovod", *argv], {}) == 0
        out, err = capsys.readouterr()
        return (err + out).replace(sys.executable, "PYTHON").replace(str(SHIM), "SHIM")

    return run


@pytest.mark.parametrize("form", ["json", "txt"])
@pytest.mark.parametrize(
    ("source", "name", "count"),
    [("ac922-6gpu-power9.tar.bz2", "ac922-6", 6), ("minsky-power8-4gpu.hwloc.xml", "power8-4", 4)],
)
def test_real_machines(
    topologies: Path, plan: Callable[..., str], golden: Golden, source: str, name: str, count: int, form: str
) -> None:
    json_option = ["--json"] if form == "json" else []
    text = plan(*json_option, "-np", str(count), "--topology", str(topologies / source), "train.py")
    golden(f"plan-{name}.{form}", text.replace(str(topologies), "TOPOLOGIES"))


def test_the_six_gpu_ac922_as_the_readme_promises(topologies: Path, plan: Callable[..., str]) -> None:
    source = str(topologies / "ac922-6gpu-power9.tar.bz2")
    ranks = json.loads(plan("--json", "-np", "6", "--topology", source, "train.py"))["ranks"]
    assert [rank["numa_node"] for rank in ranks] == [0, 0, 0, 8, 8, 8]
    assert {rank["mem_nodes"] for rank in ranks} == {"0", "8"}
    assert ranks[0]["host_mem_limit_mb"] == 38038
    assert all(rank["env"]["TF_GPU_HOST_MEM_LIMIT_IN_MB"] == str(rank["host_mem_limit_mb"]) for rank in ranks)


SYNTHETIC = {
    "dgx-8": ("dgx", 40 * GIB, ["-np", "8"]),
    "gh200-1": ("gh200", None, ["-np", "auto"]),
    "single-4-cpu": ("single", None, ["-np", "4"]),
    "cpuset-2": ("cpuset", 2 * GIB, ["-np", "2"]),
    "unknown-node-2": ("unknown-node", 2 * GIB, ["-np", "2"]),
    "ac922-cpu-ranks": ("ac922", None, ["-np", "3", "--gpus", "none"]),
    "ac922-some-gpus": ("ac922", None, ["-np", "2", "--gpus", "1,3", "--numa", "off"]),
}


@pytest.mark.parametrize("name", SYNTHETIC)
def test_synthetic_machines(tmp_path: Path, plan: Callable[..., str], golden: Golden, name: str) -> None:
    spec, gpu_bytes, options = SYNTHETIC[name]
    machine = machines.machine(spec)
    if gpu_bytes:
        machine = machines.with_gpu_memory(machine, gpu_bytes)
    saved = tmp_path / "machine.json"
    saved.write_text(json.dumps(to_json(replace(machine, source=spec))))
    text = plan(*options, "-v", "--topology", saved.name, "train.py", "--epochs", "3")
    golden(f"plan-{name}.txt", text)


@pytest.mark.parametrize("how", [(), ("-H", "a:1,b:1", "--launcher", "srun"), ("--gpus", "none")])
def test_the_heading_shows_the_gpu_memory_that_is_planned_with(
    topologies: Path, plan: Callable[..., str], how: tuple[str, ...]
) -> None:
    options = ("-np", "2", *how, "--topology", str(topologies / "minsky-power8-4gpu.hwloc.xml"))
    assert "planned with" not in plan(*options, "train.py")
    heading = "\nplanned with 8192 MiB of memory of each GPU (--gpu-memory)\n"
    assert heading in plan(*options, "--gpu-memory", "8G", "train.py")


def test_what_the_user_set_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = tmp_path / "machine.json"
    saved.write_text(json.dumps(to_json(machines.machine("ac922"))))
    environ = {"OMP_NUM_THREADS": "3", "CUDA_VISIBLE_DEVICES": "7", "TF_GPU_HOST_MEM_LIMIT_IN_MB": "20000"}
    monkeypatch.chdir(tmp_path)
    argv = [
        "plan",
        "--json",
        "-np",
        "2",
        "--topology",
        "machine.json",
        "-x",
        "A=b c",
        "-x",
        "OMP_NUM_THREADS",
        "t.py",
    ]
    assert main(argv, environ) == 0
    plan = json.loads(capsys.readouterr().out)
    for rank in plan["ranks"]:
        assert "OMP_NUM_THREADS" not in rank["env"]
        assert rank["env"]["TF_NUM_INTRAOP_THREADS"] == "8"
        assert rank["env"]["A"] == "***"
        assert rank["host_mem_limit_mb"] == 20000
    assert "comes from TF_GPU_HOST_MEM_LIMIT_IN_MB" in plan["warnings"][0]


@pytest.mark.parametrize("text", ["abc", "0", "-4", "4G"])
def test_a_host_memory_limit_of_the_environment_that_is_none_is_told(
    topologies: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    machine = str(topologies / "ac922-6gpu-power9.tar.bz2")
    argv = ["plan", "--json", "-np", "1", "--topology", machine, "train.py"]
    assert main(argv, {"TF_GPU_HOST_MEM_LIMIT_IN_MB": text}) == 0
    plan = json.loads(capsys.readouterr().out)
    needed = f"TF_GPU_HOST_MEM_LIMIT_IN_MB is {text!r}, and no number of MiB"
    assert any(needed in warning for warning in plan["warnings"])
    assert plan["ranks"][0]["host_mem_limit_mb"] > 1


def test_planning_twice_gives_the_same_bytes(topologies: Path, plan: Callable[..., str]) -> None:
    argv = ("--json", "-np", "6", "--topology", str(topologies / "ac922-6gpu-power9.tar.bz2"), "train.py")
    assert plan(*argv) == plan(*argv)
