"""lmsrun inside a real Slurm of two nodes: allocation found, ranks started by srun, failures told.

The fixture starts munged, slurmctld and two slurmd as its children and ends them (see ``slurm_cluster.py``).
Ranks meet over PMIx, as Debian builds Slurm and Open MPI.
"""

import os
import re
import shlex
import subprocess
import time
from pathlib import Path

import pytest
from cluster_run import (
    SHOW_RANK,
    TRAIN_SUM,
    clean_environ,
    digest_of,
    lmsrun,
    processes_with,
    read_ranks,
    run,
)
from hostile import ARGUMENTS, VALUES
from slurm_cluster import SlurmCluster

pytestmark = [pytest.mark.ranks, pytest.mark.cluster]


def salloc(
    slurm: SlurmCluster, folder: Path, request: str, *argv: str, timeout_s: float = 120
) -> subprocess.CompletedProcess[str]:
    slurm.ready_again()
    return run(["salloc", *request.split(), *lmsrun(*argv)], folder, slurm.environ, timeout_s)


def test_an_allocation_is_found_and_filled(slurm: SlurmCluster, tmp_path: Path) -> None:
    given = [word for name, value in VALUES.items() for word in ("-x", f"{name}={value}")]
    argv = ("run", *given, "--", str(SHOW_RANK), str(tmp_path), "ok", *ARGUMENTS)
    os.environ["LMS_TEST_SECRET_TOKEN"] = "do not tell"
    try:
        done = salloc(slurm, tmp_path, "--nodes=2 --ntasks-per-node=2", *argv)
    finally:
        del os.environ["LMS_TEST_SECRET_TOKEN"]
    assert done.returncode == 0, done.stderr
    assert "launcher: srun (this is Slurm job" in done.stderr
    ranks = read_ranks(tmp_path, 4)
    assert [rank["sizes"] for rank in ranks] == [[local, "4", "2"] for local in "0101"]
    for rank in ranks:
        assert rank["argv"] == list(ARGUMENTS)
        assert {name: rank["env"].get(name) for name in VALUES} == VALUES
        assert rank["env"]["MASTER_ADDR"] == "n1"
        assert rank["secrets"] == [], "a secret went to another host"
    assert not list(tmp_path.rglob("pwned"))
    assert done.stderr.count(" yes") == 4, "receipts come home as lines of stderr"
    assert "lmsrun-receipt" not in done.stdout + done.stderr


def test_hosts_may_differ_in_ranks(slurm: SlurmCluster, tmp_path: Path) -> None:
    argv = ("run", "-np", "3", "--", str(SHOW_RANK), str(tmp_path), "ok")
    done = salloc(slurm, tmp_path, "--nodes=2 --ntasks-per-node=2", *argv)
    assert done.returncode == 0, done.stderr
    assert [rank["sizes"] for rank in read_ranks(tmp_path, 3)] == [
        ["0", "3", "2"],
        ["1", "3", "2"],
        ["0", "3", "1"],
    ]


@pytest.mark.parametrize(("how", "code"), [("exit:3:7", 7), ("kill:0:9", 137)])
def test_the_first_to_fail_is_named(slurm: SlurmCluster, tmp_path: Path, how: str, code: int) -> None:
    started = time.monotonic()
    argv = ("run", "--", str(SHOW_RANK), str(tmp_path), how)
    done = salloc(slurm, tmp_path, "--nodes=2 --ntasks-per-node=2", *argv)
    assert done.returncode == code, done.stderr
    rank, node = ("3", "n2") if how == "exit:3:7" else ("0", "n1")
    assert f"lmsrun: rank {rank} on {node} (no GPU) " in done.stderr
    assert time.monotonic() - started < 30
    assert processes_with(str(SHOW_RANK)) == []


def test_a_rank_that_stands_still_on_another_host_is_named(slurm: SlurmCluster, tmp_path: Path) -> None:
    options = ("--stall-timeout", "6", "--stall-kill", "--grace-period", "3")
    argv = ("run", *options, "--", str(SHOW_RANK), str(tmp_path), "kill:1:19")
    done = salloc(slurm, tmp_path, "--nodes=2 --ntasks-per-node=1", *argv)
    assert done.returncode == 124, done.stderr
    assert " s: rank 1 is stopped (SIGSTOP); ended by --stall-kill" in done.stderr
    assert processes_with(str(SHOW_RANK)) == []


def test_each_node_is_asked_before_the_job(slurm: SlurmCluster, tmp_path: Path) -> None:
    """Over srun: two slurmd of one machine answer under their own names."""
    words = ("run", "--dry-run", "-H", "n2:2,n1:1", "--", "true")
    done = salloc(slurm, tmp_path, "--nodes=2 --ntasks-per-node=2", *words)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"(?m)^(\d) +(n[12]) +", done.stdout) == [("0", "n2"), ("1", "n2"), ("2", "n1")]
    assert "assumed" not in done.stdout


def test_a_node_that_died_is_named_before_the_job(slurm: SlurmCluster, tmp_path: Path) -> None:
    slurm.ready_again()
    # The batch script waits until the node is dead; Slurm itself has not noticed yet.
    wait = f'touch "{tmp_path}/go"; while [ -e "{tmp_path}/go" ]; do sleep 0.1; done; exec "$@"'
    argv = lmsrun("run", "--", str(SHOW_RANK), str(tmp_path), "ok")
    job = subprocess.Popen(
        ["salloc", "--nodes=2", "--ntasks-per-node=1", "sh", "-c", wait, "sh", *argv],
        env={**clean_environ(), **slurm.environ},
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        end = time.monotonic() + 300
        while not (tmp_path / "go").exists() and time.monotonic() < end:
            time.sleep(0.1)
        slurm.kill_node("n2")
        (tmp_path / "go").unlink()
        output, _ = job.communicate(timeout=600)
    finally:
        job.kill()
        slurm.start_node("n2")
    assert job.returncode == 2, output
    assert "lmsrun: n2  " in output and "nothing was started" in output
    assert not list(tmp_path.glob("rank-*"))


def test_more_ranks_than_slots(slurm: SlurmCluster, tmp_path: Path) -> None:
    argv = ("run", "-np", "5", "--", str(SHOW_RANK), str(tmp_path), "ok")
    done = salloc(slurm, tmp_path, "--nodes=2 --ntasks-per-node=2", *argv)
    assert done.returncode == 2
    assert "5 ranks do not fit on 2 hosts with 4 slots" in done.stderr
    outside = salloc(
        slurm, tmp_path, "--nodes=2 --ntasks-per-node=2", "run", "-H", "n3:1", "--", str(SHOW_RANK), "."
    )
    assert outside.returncode == 2
    assert "host 'n3' is not in Slurm job" in outside.stderr


def test_a_batch_script_of_ours(slurm: SlurmCluster, tmp_path: Path) -> None:
    slurm.ready_again()
    words = ("run", "--print-script", "slurm", "-H", "x:2,y:2")
    printed = run(lmsrun(*words, "--", str(SHOW_RANK), str(tmp_path), "ok", "a b;$(id)"), tmp_path)
    assert printed.returncode == 0, printed.stderr
    script = printed.stdout.replace("exec lmsrun ", f"exec {shlex.join(lmsrun())} ")
    (tmp_path / "job.sh").write_text(script)
    done = run(["sbatch", "--wait", str(tmp_path / "job.sh")], tmp_path, slurm.environ)
    output = "".join(path.read_text() for path in tmp_path.glob("show_rank-*.out"))
    assert done.returncode == 0, done.stderr + output
    assert [rank["argv"] for rank in read_ranks(tmp_path, 4)] == [["a b;$(id)"]] * 4


@pytest.mark.parametrize("blow", ["scancel", "kill slurmd"])
def test_a_lost_job_ends_everywhere(slurm: SlurmCluster, tmp_path: Path, blow: str) -> None:
    slurm.ready_again()
    argv = lmsrun("run", "--", str(SHOW_RANK), str(tmp_path), "exit:9:1")
    job = subprocess.Popen(
        ["salloc", "--nodes=2", "--ntasks-per-node=1", *argv],
        env={**clean_environ(), **slurm.environ},
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    end = time.monotonic() + 300
    while len(list(tmp_path.glob("rank-*.json"))) < 2 and time.monotonic() < end:
        time.sleep(0.1)
    lost = blow == "kill slurmd"
    if lost:
        slurm.kill_node("n2")  # Slurm itself finds out, after its SlurmdTimeout.
    else:
        run(["scancel", "--state=RUNNING", "--user=root"], tmp_path, slurm.environ)
    try:
        output, _ = job.communicate(timeout=300)
    finally:
        job.kill()
        if lost:
            # On a node without its daemon nobody can end a task; the daemon does it when it is back.
            slurm.start_node("n2")
            slurm.ready_again()
    assert job.returncode not in (0, None), output
    assert not lost or "Node failure on n2" in output
    assert processes_with(str(SHOW_RANK)) == [], output


def test_a_launcher_inside_a_step_is_refused(slurm: SlurmCluster, tmp_path: Path) -> None:
    slurm.ready_again()
    argv = [
        "srun",
        "--nodes=1",
        "--ntasks=2",
        "--mpi=none",
        *lmsrun("run", "--", str(SHOW_RANK), str(tmp_path), "ok"),
    ]
    done = run(argv, tmp_path, slurm.environ)
    assert done.returncode == 2
    assert "srun lmsrun worker -- PROGRAM" in done.stderr
    worker = [
        "srun",
        "--nodes=2",
        "--ntasks=2",
        "--mpi=none",
        *lmsrun("worker", "--", str(SHOW_RANK), str(tmp_path), "ok"),
    ]
    assert run(worker, tmp_path, slurm.environ).returncode == 0
    assert [rank["sizes"] for rank in read_ranks(tmp_path, 2)] == [["0", "2", "1"]] * 2


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
@pytest.mark.parametrize("bind", ["--cpu-bind=map_cpu:0,1", "--cpu-bind=mask_cpu:0x1,0x2"])
def test_tasks_that_slurm_has_bound_keep_what_all_of_them_have(
    slurm: SlurmCluster, tmp_path: Path, bind: str
) -> None:
    slurm.ready_again()
    step = ["srun", "--nodes=1", "--ntasks=2", "--mpi=none", bind]
    done = run([*step, *lmsrun("worker", "--", str(SHOW_RANK), str(tmp_path), "ok")], tmp_path, slurm.environ)
    assert done.returncode == 0, done.stderr
    first, second = (set(rank["cpus"]) for rank in read_ranks(tmp_path, 2))
    # Planned each within its own task's CPU, both ranks would get half of nothing.
    assert "share the" not in done.stderr
    assert first and second and not first & second


@pytest.mark.tensorflow
@pytest.mark.parametrize("request_", ["--nodes=1 --ntasks=2", "--nodes=2 --ntasks-per-node=1"])
def test_horovod_trains_over_pmix(slurm: SlurmCluster, tmp_path: Path, request_: str) -> None:
    """The controller is MPI, so the step's ranks are one MPI job; the weights are those of any launcher."""
    pytest.importorskip("horovod")
    done = salloc(slurm, tmp_path, request_, "run", "--no-lms", "--", str(TRAIN_SUM), timeout_s=300)
    assert done.returncode == 0, done.stderr
    found = sorted(line.partition("weights ")[2] for line in done.stdout.splitlines() if "weights" in line)
    assert found == [f"{rank} 2 {digest_of(2)}" for rank in range(2)]
    assert done.stderr.count("yes, also after hvd.init()") == 2


def test_mpi4py_sums_over_two_nodes(slurm: SlurmCluster, tmp_path: Path) -> None:
    pytest.importorskip("mpi4py")
    source = "from mpi4py import MPI; c = MPI.COMM_WORLD; print('sum', c.size, c.allreduce(c.rank + 1))"
    (tmp_path / "sum.py").write_text(source)
    # One a node: Open MPI names its shared memory by host name, which these two nodes have in common.
    done = salloc(slurm, tmp_path, "--nodes=2 --ntasks-per-node=1", "run", "--", str(tmp_path / "sum.py"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("sum 2 3") == 2, done.stdout
