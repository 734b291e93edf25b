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
        command, cwd=folder, env=environ, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.ranks
def test_a_path_for_the_ranks_is_not_where_the_launcher_looks(tmp_path: Path) -> None:
    done = lmsrun(tmp_path, "-np", "1", "-x", "PATH=/nonexistent", "/bin/sh", "-c", "echo $PATH")
    assert (done.returncode, done.stdout) == (0, "/nonexistent\n"), done.stderr


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
