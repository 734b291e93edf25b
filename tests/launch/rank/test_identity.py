"""Which rank a process is, by the variables of every launcher of the table."""

import pytest

from launch.model.errors import UsageError
from launch.rank.identity import ROWS, find_rank, read_rank, read_slurm_cpus

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
SLURM_BATCH = {
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NTASKS": "8",
    "SLURM_TASKS_PER_NODE": "4(x2)",
}
TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.launcher)
def test_every_row_is_read(row: object) -> None:
    keys = ("rank", "world_size", "local_rank", "local_world_size")
    names = [(*getattr(row, key), "LOCAL_WORLD_SIZE")[0] for key in keys]
    found = read_rank(dict(zip(names, ("5", "8", "1", "4"), strict=True)))
    assert (found.rank, found.world_size, found.local_rank, found.local_world_size) == (5, 8, 1, 4)
    assert found.launcher == getattr(row, "launcher", None)


def test_flux_counts_hosts_and_not_the_ranks_of_this_one() -> None:
    flux = {"FLUX_TASK_RANK": "3", "FLUX_JOB_SIZE": "8", "FLUX_TASK_LOCAL_ID": "1", "FLUX_JOB_NNODES": "4"}
    found = read_rank(flux)
    assert (found.launcher, found.rank, found.local_rank, found.local_world_size) == ("Flux", 3, 1, 2)
    assert read_rank({**flux, "LOCAL_WORLD_SIZE": "5"}).local_world_size == 5
    with pytest.raises(UsageError, match="put 8 ranks on 3 hosts, unevenly; export LOCAL_WORLD_SIZE"):
        read_rank({**flux, "FLUX_JOB_NNODES": "3"})
    with pytest.raises(UsageError, match="local rank 2 of 2"):
        read_rank({**flux, "FLUX_TASK_LOCAL_ID": "2"})
    assert read_rank({**flux, **TORCHRUN}).launcher == "torchrun"


def test_intel_mpi() -> None:
    found = read_rank({"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"})
    assert (found.rank, found.local_rank, found.affinity) == (3, 1, "parent")


@pytest.mark.parametrize("inner", [OPEN_MPI, TORCHRUN])
def test_a_launcher_inside_a_batch_job_wins_over_the_batch_script(inner: dict[str, str]) -> None:
    assert read_rank({**SLURM_BATCH, **inner}).rank == 5


@pytest.mark.parametrize(("node", "local"), [("0", 4), ("1", 4), ("2", 3)])
def test_slurm_counts_tasks_on_this_node(node: str, local: int) -> None:
    environ = {"SLURM_PROCID": "8", "SLURM_LOCALID": "0", "SLURM_NTASKS": "11", "SLURM_NODEID": node}
    assert read_rank({**environ, "SLURM_STEP_TASKS_PER_NODE": "4(x2),3"}).local_world_size == local
    assert read_rank({**environ, "SLURM_STEP_TASKS_PER_NODE": "6"}).local_world_size == 6, "of every node"


@pytest.mark.parametrize(
    ("node", "said"), [("3", "which counts 3 hosts; needed 4"), ("x", "SLURM_NODEID is 'x'")]
)
def test_a_node_that_slurms_list_does_not_reach_is_one_line(node: str, said: str) -> None:
    environ = {"SLURM_PROCID": "8", "SLURM_LOCALID": "0", "SLURM_NTASKS": "11", "SLURM_NODEID": node}
    with pytest.raises(UsageError, match=said):
        read_rank({**environ, "SLURM_STEP_TASKS_PER_NODE": "4(x2),3"})


@pytest.mark.parametrize(
    ("environ", "rank"),
    [
        ({**SLURM_BATCH, "SLURM_PROCID": "3", "RANK": "5"}, 3),
        ({**SLURM_BATCH, **OPEN_MPI, "RANK": "7"}, 5),
        ({"RANK": "5"}, 5),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "x", "SLURM_PROCID": "2"}, 2),
        ({"RANK": "x"}, None),
        ({"RANK": "1" * 5000}, None),
        ({}, None),
    ],
)
def test_a_stale_rank_of_the_users_is_not_named_in_messages(
    environ: dict[str, str], rank: int | None
) -> None:
    assert find_rank(environ) == rank


def test_a_missing_local_rank_may_be_exported_by_hand() -> None:
    environ = {"PMI_RANK": "1", "PMI_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    found = read_rank(environ)
    assert (found.launcher, found.local_rank) == ("MPICH or Intel MPI", 1)


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({}, ["none of HOROVOD_RANK", "start it with lmsrun"]),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, ["PMI_RANK=1", "MPI_LOCALRANKID", "mpiexec.hydra"]),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": ""}, ["number of ranks on this host", "mpirun"]),
        ({**TORCHRUN, "RANK": "x"}, ["RANK is 'x'", "whole number"]),
        ({**TORCHRUN, "RANK": "-1"}, ["RANK is '-1'"]),
        ({**TORCHRUN, "RANK": "1" * 5000}, ["RANK is '1111", "whole number"]),
        ({**TORCHRUN, "RANK": "8"}, ["rank 8 of 8"]),
        ({**TORCHRUN, "LOCAL_RANK": "4"}, ["local rank 4 of 4"]),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "9"}, ["local rank 1 of 9", "8 in all"]),
    ],
)
def test_what_is_missing_or_contradicts_is_said(environ: dict[str, str], words: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        read_rank(environ)
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


def test_one_rank_needs_no_local_size() -> None:
    assert read_rank({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}).local_world_size == 1


@pytest.mark.parametrize(
    ("text", "cpus"),
    [
        ("quiet,mask_cpu:0x000000FF,0x0000FF00", set(range(16))),
        ("mask_cpu:0x1*2,0x8", {0, 3}),
        ("mask_cpu:0x100000000000000000", {68}),
        ("verbose,map_cpu:0,0x1f,7*3", {0, 31, 7}),
        ("quiet,none", None),
        ("quiet", None),
        ("", None),
        ("quiet,rank_ldom:0xff", None),
        ("quiet,mask_cpu:", set()),
        ("quiet,mask_cpu:zz", None),
        ("quiet,map_cpu:-1", None),
        ("quiet,map_cpu:" + "9" * 5000, None),
        ("quiet,map_cpu:0x" + "f" * 5000, None),
    ],
)
def test_slurm_tells_the_masks_of_all_tasks_of_a_node(text: str, cpus: set[int] | None) -> None:
    assert read_slurm_cpus({"SLURM_CPU_BIND": text}) == cpus
