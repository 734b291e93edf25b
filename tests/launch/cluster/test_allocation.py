"""Allocations of Slurm, LSF, PBS and Kubernetes as their variables and files give them."""

from pathlib import Path

import pytest

from launch.cluster.allocation import read_allocation
from launch.cluster.hosts import Host
from launch.model.errors import UsageError


def counted(name: str, slots: int) -> Host:
    """Build a host whose slots may be cores."""
    return Host(name, slots, may_count_cores=True)


SLURM = {"SLURM_JOB_ID": "12", "SLURM_JOB_NODELIST": "node[01-02],gpu7"}


def test_no_allocation() -> None:
    assert read_allocation({"PATH": "/bin"}) is None


@pytest.mark.parametrize(
    ("more", "slots"),
    [
        ({}, (None, None, None)),
        ({"SLURM_TASKS_PER_NODE": "2(x3)"}, (None, None, None)),
        ({"SLURM_TASKS_PER_NODE": "2(x2),1", "SLURM_NTASKS": "5"}, (2, 2, 1)),
        ({"SLURM_TASKS_PER_NODE": "2(x3)", "SLURM_NTASKS_PER_NODE": "2"}, (2, 2, 2)),
        ({"SLURM_GPUS_ON_NODE": "4", "SLURM_NTASKS": "3", "SLURM_TASKS_PER_NODE": "1(x3)"}, (4, 4, 4)),
        ({"SLURM_GPUS_PER_NODE": "v100:6"}, (6, 6, 6)),
        ({"SLURM_GPUS": "v100:12", "SLURM_GPUS_ON_NODE": "4"}, (4, 4, 4)),
        ({"SLURM_GPUS": "8", "SLURM_GPUS_ON_NODE": "4"}, (None, None, None)),
        (
            {
                **{"SLURM_GPUS": "8", "SLURM_GPUS_ON_NODE": "4"},
                **{"SLURM_NTASKS": "3", "SLURM_TASKS_PER_NODE": "1(x3)"},
            },
            (None, None, None),
        ),
        ({"SLURM_GPUS_PER_NODE": "gpu:a100:2,gpu:v100:2"}, (4, 4, 4)),
        ({"SLURM_GPUS_ON_NODE": "0", "SLURM_NTASKS": "3", "SLURM_TASKS_PER_NODE": "1(x3)"}, (1, 1, 1)),
    ],
)
def test_slurm(more: dict[str, str], slots: tuple[int | None, ...]) -> None:
    allocation = read_allocation({**SLURM, **more})
    assert allocation is not None
    assert allocation.title == "Slurm job 12"
    assert [host.name for host in allocation.hosts] == ["node01", "node02", "gpu7"]
    assert tuple(host.slots for host in allocation.hosts) == slots


@pytest.mark.parametrize(("node", "here"), [("0", "4"), ("1", "2")])
def test_slurm_deals_gpus_to_two_hosts_as_it_has_room(node: str, here: str) -> None:
    dealt = {"SLURM_GPUS": "6", "SLURM_GPUS_ON_NODE": here, "SLURM_NODEID": node}
    allocation = read_allocation({**SLURM, "SLURM_JOB_NODELIST": "node01,gpu7", **dealt})
    assert allocation is not None
    assert {host.name: host.slots for host in allocation.hosts} == {"node01": 4, "gpu7": 2}


@pytest.mark.parametrize(
    "more",
    [
        {"SLURM_JOB_NODELIST": "n[1-"},
        {"SLURM_JOB_NODELIST": "a,a"},
        {"SLURM_GPUS_PER_NODE": "many"},
        {"SLURM_NTASKS": "4", "SLURM_TASKS_PER_NODE": "2(x2)"},
        {"SLURM_TASKS_PER_NODE": "foo"},
        {"SLURM_TASKS_PER_NODE": "2(x"},
        {"SLURM_NTASKS": "foo"},
        {"SLURM_NTASKS_PER_NODE": "-1"},
        {"SLURM_NPROCS": "9" * 5000},
    ],
)
def test_slurm_contradicts_itself(more: dict[str, str]) -> None:
    with pytest.raises(UsageError) as caught:
        read_allocation({**SLURM, **more})
    assert "SLURM_" in str(caught.value) and len(str(caught.value)) < 300


def test_lsf() -> None:
    allocation = read_allocation({"LSB_JOBID": "9", "LSB_MCPU_HOSTS": "h1 4 h2 4"})
    assert allocation is not None and not allocation.csm
    assert allocation.hosts == (counted("h1", 4), counted("h2", 4))
    by_name = read_allocation({"LSB_JOBID": "9", "LSB_HOSTS": "h1 h1 h2"})
    assert by_name is not None and by_name.hosts == (counted("h1", 2), counted("h2", 1))


def test_lsf_with_csm_leaves_out_the_launch_node() -> None:
    environ = {"LSB_JOBID": "9", "LSB_MCPU_HOSTS": "batch2 1 h41n01 42 h41n02 42", "CSM_ALLOCATION_ID": "77"}
    allocation = read_allocation(environ)
    assert allocation is not None and allocation.csm
    assert allocation.hosts == (Host("h41n01"), Host("h41n02"))


@pytest.mark.parametrize("text", ["h1", "h1 x", "h1 0", "h1 4 h1 4", "$(id) 4", "h1 99999999999"])
def test_lsf_is_damaged(text: str) -> None:
    with pytest.raises(UsageError):
        read_allocation({"LSB_JOBID": "9", "LSB_MCPU_HOSTS": text})


def test_lsf_without_hosts() -> None:
    with pytest.raises(UsageError, match="LSB_MCPU_HOSTS"):
        read_allocation({"LSB_JOBID": "9"})


def test_pbs(tmp_path: Path) -> None:
    (tmp_path / "nodes").write_text("a\na\nb\nb\n")
    (tmp_path / "gpus").write_text("a-gpu0\na-gpu1\na-gpu2\nb-gpu0\n")
    environ = {"PBS_JOBID": "5.pbs", "PBS_NODEFILE": "/nodes"}
    plain = read_allocation(environ, tmp_path)
    assert plain is not None and plain.hosts == (counted("a", 2), counted("b", 2))
    torque = read_allocation({**environ, "PBS_GPUFILE": "/gpus"}, tmp_path)
    assert torque is not None and torque.hosts == (Host("a", 3), Host("b", 1))
    with pytest.raises(UsageError, match="cannot read the host file '/none'"):
        read_allocation({**environ, "PBS_NODEFILE": "/none"}, tmp_path)


def test_a_host_file_named_from_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nodes").write_text("\ufeffa\r\nb\r\n")
    monkeypatch.chdir(tmp_path)
    found = read_allocation({"PBS_JOBID": "5.pbs", "PBS_NODEFILE": "nodes"})
    assert found is not None and found.hosts == (counted("a", 1), counted("b", 1))
    with pytest.raises(UsageError, match="cannot read the host file 'gone/nodes': No such file"):
        read_allocation({"PBS_NODEFILE": "gone/nodes"})


def test_an_mpijob(tmp_path: Path) -> None:
    environ = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}
    assert read_allocation(environ, tmp_path) is None, "a pod is no MPIJob"
    (tmp_path / "etc/mpi").mkdir(parents=True)
    (tmp_path / "etc/mpi/hostfile").write_text(
        "job-worker-0.job.default.svc slots=8\njob-worker-1.job.default.svc slots=8\n"
    )
    allocation = read_allocation(environ, tmp_path)
    assert allocation is not None
    assert allocation.title == "Kubernetes MPIJob"
    assert [host.slots for host in allocation.hosts] == [8, 8]
    (tmp_path / "etc/mpi/hostfile").write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="not text"):
        read_allocation(environ, tmp_path)
