"""The job script for Slurm of ``docker/templates``, submitted to a real Slurm (see ``slurm_cluster.py``).

Slurm here has no GPUs and this machine no Apptainer: the line that asks for GPUs is left out, and a stand-in
for ``apptainer exec`` starts the container's command as it is.
"""

import json
import os
import sys
from pathlib import Path

import pytest
from cluster_run import LMSRUN, run
from slurm_cluster import SlurmCluster

pytestmark = [pytest.mark.ranks, pytest.mark.cluster]

TEMPLATE = Path(__file__).resolve().parents[2] / "docker" / "templates" / "slurm.sh"
GPU_LINE = "#SBATCH --gpus-per-node=4\n"
TRAIN = """
import json, os, pathlib, time
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "SLURMD_NODENAME")
pathlib.Path(f"rank-{os.environ['RANK']}.json").write_text(json.dumps([os.environ[name] for name in names]))
if "FAIL_AS" in os.environ:
    if os.environ["RANK"] == "1":
        raise SystemExit(int(os.environ["FAIL_AS"]))
    time.sleep(600)  # Until Slurm ends it, with SIGTERM: 143.
"""


@pytest.fixture
def site(tmp_path: Path) -> dict[str, str]:
    """A folder with the template, a program, and on PATH what a site would have."""
    programs = {
        "apptainer": '#!/bin/sh\ntest "$1 $2 $3" = "exec --nv lmsrun.sif" && shift 3 && exec "$@"\n',
        "lmsrun": f'#!/bin/sh\nexec "{sys.executable}" "{LMSRUN}" "$@"\n',
        "python": f'#!/bin/sh\nexec "{sys.executable}" "$@"\n',
    }
    (tmp_path / "bin").mkdir()
    for name, text in programs.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    script = TEMPLATE.read_text()
    assert script.count(GPU_LINE) == 1
    (tmp_path / "job.sh").write_text(script.replace(GPU_LINE, ""))
    (tmp_path / "train.py").write_text(TRAIN)
    return {"PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"}


def output(folder: Path) -> str:
    return "".join(path.read_text() for path in folder.glob("train-*.out"))


def test_every_task_becomes_a_rank_that_knows_its_place(
    slurm: SlurmCluster, site: dict[str, str], tmp_path: Path
) -> None:
    environ = {**slurm.environ, **site}
    assert run(["sbatch", "--test-only", "job.sh"], tmp_path, environ).returncode == 0
    done = run(["sbatch", "--wait", "--nodes=1", "--ntasks-per-node=2", "job.sh"], tmp_path, environ)
    assert done.returncode == 0, done.stderr + output(tmp_path)
    ranks = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in (0, 1)]
    assert [rank[:4] for rank in ranks] == [["0", "0", "2", "2"], ["1", "1", "2", "2"]]
    assert ranks[0][4] == ranks[1][4] != ""


def test_a_failing_rank_s_code_is_the_job_s(
    slurm: SlurmCluster, site: dict[str, str], tmp_path: Path
) -> None:
    argv = ["sbatch", "--wait", "--nodes=1", "--ntasks-per-node=2", "job.sh"]
    done = run(argv, tmp_path, {**slurm.environ, **site, "FAIL_AS": "7"})
    assert done.returncode == 7, done.stderr + output(tmp_path)
