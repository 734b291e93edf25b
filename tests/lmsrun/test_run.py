"""`lmsrun run` end to end with real ranks: what the plan says is what the ranks find."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from launch.model.plan import SHIM

PROGRAM = """
import json, os, sys
names = ("RANK", "WORLD_SIZE", "MESSAGE", "OMP_NUM_THREADS", "LMS_ENABLED")
found = {"argv": sys.argv[1:], **{name: os.environ.get(name) for name in names}}
open("rank-%s.found" % os.environ["RANK"], "w").write(json.dumps(found))
"""
HOSTILE = ["a b", "$(touch pwned)", ";", "--np", "-np", "0", "--", "new\nline", "'\"", "*", ""]


def lmsrun(folder: Path, *argv: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(SHIM), *argv]
    environ = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    return subprocess.run(
        command, cwd=folder, env=environ, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.mark.ranks
def test_the_job_says_where_its_output_is(tmp_path: Path) -> None:
    done = lmsrun(tmp_path, "-np", "1", "--output-dir", "out", "--no-lms", "true")
    folder = (tmp_path / "out" / "latest").resolve().name
    assert (done.returncode, f"lmsrun: output goes to out/{folder}\n" in done.stderr) == (0, True)


def test_a_batch_script_has_no_value_of_a_variable_on_a_command_line(tmp_path: Path) -> None:
    argv = (
        "-np",
        "1",
        "--gpus",
        "none",
        "-x",
        "KEY=se cret",
        "-x",
        "PATH",
        "--print-script",
        "slurm",
        "true",
    )
    done = lmsrun(tmp_path, *argv)
    lines = done.stdout.splitlines()
    assert "export KEY='se cret'" in lines
    assert [line for line in lines if "se cret" in line] == ["export KEY='se cret'"]
    assert "--forward KEY --forward PATH" in lines[-1]
    assert "the script holds the values of KEY; keep it from others" in done.stderr


@pytest.mark.parametrize("host_probe", ["", "host-probe = true\n"])
@pytest.mark.parametrize("argv", [("plan",), ("--dry-run",)])
def test_a_plan_starts_no_mpirun_that_a_file_names(
    tmp_path: Path, argv: tuple[str, ...], host_probe: str
) -> None:
    mpirun = tmp_path / "mpirun"
    mpirun.write_text(f"#!/bin/sh\ntouch {tmp_path}/started\necho 'mpirun (Open MPI) 4.1.4'\n")
    mpirun.chmod(0o755)
    (tmp_path / "lmsrun.toml").write_text(f'mpirun = "{mpirun}"\nlauncher = "mpirun"\n{host_probe}')
    done = lmsrun(
        tmp_path, *argv, "-np", "2", "-H", "localhost:2", "--gpus", "none", "--oversubscribe", "true"
    )
    assert done.returncode == 0, done.stderr
    assert "is not started for a plan" in " ".join(done.stdout.split())
    assert not (tmp_path / "started").exists()
    asked = lmsrun(tmp_path, *argv, "--mpirun", str(mpirun), "-H", "localhost:2", "--gpus", "none", "true")
    assert asked.returncode == 0 and (tmp_path / "started").exists()


def test_an_elastic_job_says_whom_its_rendezvous_trusts(tmp_path: Path) -> None:
    (tmp_path / "hosts.sh").write_text("#!/bin/sh\necho localhost:1\n")
    (tmp_path / "hosts.sh").chmod(0o755)
    elastic = ("--min-np", "1", "--host-discovery-script", "./hosts.sh", "t.py")
    assert "CVE-2024-10190" in lmsrun(tmp_path, "plan", "-np", "1", *elastic).stdout
    assert "CVE-2024-10190" not in lmsrun(tmp_path, "plan", "-np", "1", "t.py").stdout


@pytest.mark.ranks
def test_a_path_for_the_ranks_is_not_where_the_launcher_looks(tmp_path: Path) -> None:
    done = lmsrun(tmp_path, "-np", "1", "-x", "PATH=/nonexistent", "/bin/sh", "-c", "echo $PATH")
    assert (done.returncode, done.stdout) == (0, "/nonexistent\n"), done.stderr


@pytest.mark.ranks
@pytest.mark.parametrize("way", ["exported", "given"])
def test_a_rank_has_the_gpu_that_the_environment_shows_also_by_a_saved_topology(
    tmp_path: Path, way: str
) -> None:
    machine = tmp_path / "here.json"
    lmsrun(tmp_path, "topo", "--save", str(machine))
    gpu = {"name": None, "uuid": None, "numa_node": None, "cpus": "", "memory_bytes": None}
    gpus = [{**gpu, "index": place, "pci_bus_id": f"0000:0{place}:00.0"} for place in range(4)]
    machine.write_text(json.dumps({**json.loads(machine.read_text()), "gpus": gpus}))
    show = 'echo "$CUDA_VISIBLE_DEVICES $LMSRUN_GPUS"; echo "$LMSRUN_EXPECT"'
    variable = "CUDA_VISIBLE_DEVICES=2,3"
    before, words = (("env", variable), ()) if way == "exported" else ((), ("-x", variable))
    argv = [*before, sys.executable, str(SHIM), *words, "--topology", str(machine), "-np", "1"]
    done = subprocess.run(
        [*argv, "/bin/sh", "-c", show], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    shown, expected = done.stdout.splitlines()
    assert (shown, json.loads(expected)["gpu"]) == ("2,3 2,3", "0000:02:00.0")


@pytest.mark.ranks
def test_a_job_in_a_rank_of_a_job_knows_nothing_of_the_outer_ones_ways(tmp_path: Path) -> None:
    """Else its ranks would speak for ranks of the outer job, and wait for its channel."""
    outer = {"LMSRUN_JOB_ID": "00", "LMSRUN_CONTROL": str(tmp_path / "socket"), "LMSRUN_STDIN": "3"}
    outer |= {
        "LMSRUN_RECEIPT_LINES": "1",
        "LMSRUN_REPLAN": "{}",
        "LMSRUN_SENT_START": "1",
        "LMSRUN_JOB_NOTE": "ab",
    }
    argv = [sys.executable, str(SHIM), "-np", "1", "--numa", "off", "--gpus", "none", "env"]
    done = subprocess.run(
        argv,
        cwd=tmp_path,
        env={**os.environ, **outer},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = dict(line.split("=", 1) for line in done.stdout.splitlines() if line.startswith("LMSRUN_"))
    assert found["LMSRUN_JOB_ID"] != "00"
    assert not found.keys() & (outer.keys() - {"LMSRUN_JOB_ID", "LMSRUN_JOB_NOTE"})


@pytest.mark.ranks
def test_ranks_get_what_the_plan_says_and_the_program_its_arguments(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    job = ["-np", "2", "--oversubscribe", "--gpus", "none", "-x", "MESSAGE=$(x) y\nz", "--no-lms"]
    plan = json.loads(lmsrun(tmp_path, "plan", "--json", *job, "program.py", *HOSTILE).stdout)
    done = lmsrun(tmp_path, *job, "--output-dir", "out", "program.py", *HOSTILE)
    assert done.returncode == 0, done.stderr
    receipts = json.loads((tmp_path / "out" / "latest" / "receipts.json").read_text())["ranks"]
    for rank, receipt in zip(plan["ranks"], receipts, strict=True):
        found = json.loads((tmp_path / f"rank-{rank['rank']}.found").read_text())
        assert found["argv"] == HOSTILE
        assert found["MESSAGE"] == "$(x) y\nz"
        assert (found["WORLD_SIZE"], found["LMS_ENABLED"]) == ("2", "0")
        assert found["OMP_NUM_THREADS"] == rank["env"]["OMP_NUM_THREADS"]
        assert receipt["cpus"] == rank["cpus"]
        assert (receipt["mem_policy"], receipt["mem_nodes"]) == (rank["mem_policy"], rank["mem_nodes"])
    assert not (tmp_path / "pwned").exists()
