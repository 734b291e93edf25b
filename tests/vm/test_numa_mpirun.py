"""``mpirun lmsrun worker`` on real NUMA kernels: what /proc says of each rank is what lmsrun plans there."""

import json
import shutil
from pathlib import Path

import pytest
from numa_guest import CACHE, REPOSITORY, RIG, boot

from launch.model.idset import parse_ids

pytestmark = [pytest.mark.vm, pytest.mark.cluster]

LMSRUN = ("python3", "lmsrun/__main__.py")
# Two ranks on purpose: Open MPI binds each to one core then, which lmsrun has to undo.
MPIRUN = ("mpirun", "--allow-run-as-root", "-np", "2", "--oversubscribe")


@pytest.mark.parametrize("profile", ["dgx", "ac922"])
def test_ranks_of_mpirun_sit_where_lmsrun_plans(profile: str, tmp_path: Path) -> None:
    if not RIG.exists():
        pytest.skip(f"no rig at {RIG}")
    if not list(CACHE.glob("root-x86_64-*/root.img")):
        pytest.skip(f"no guest image in {CACHE}")
    for package in ("launch", "lmsrun", "lms"):
        shutil.copytree(
            REPOSITORY / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__")
        )
    for script in ("rank_report.py", "steps.py"):
        shutil.copy(Path(__file__).parent / "guest" / script, tmp_path)
    options = ("--gpu-memory", "64M")
    steps = {
        "plan": (*LMSRUN, "plan", "--json", "-np", "2", *options, "rank_report.py"),
        "ranks": (*MPIRUN, "-x", "LMSRUN_GPU_MEMORY=64M", *LMSRUN, "worker", "--", "rank_report.py"),
    }
    done = boot(profile, steps, tmp_path, "--packages", "openmpi-bin")
    if done.returncode == 125:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stderr[-2000:]
    results = json.loads(done.stdout)
    for name, result in results.items():
        assert result["code"] == 0, f"{name}: {result['err']}"
    planned = {rank["rank"]: rank for rank in json.loads(results["plan"]["out"])["ranks"]}
    lines = [json.loads(line) for line in results["ranks"]["out"].splitlines() if line.startswith("{")]
    found = {line["rank"]: line for line in lines}
    assert sorted(found) == [0, 1], results["ranks"]
    for rank, report in found.items():
        assert report["cpus"] == planned[rank]["cpus"]
        assert report["policy"].startswith(planned[rank]["mem_policy"])
        assert set(map(int, report["pages"])) <= parse_ids(planned[rank]["mem_nodes"])
        assert report["limit"] == str(planned[rank]["host_mem_limit_mb"])
