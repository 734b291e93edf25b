"""Jobs over hosts: the plan of every host, which launcher, batch scripts, and Summit's size."""

import resource
import time
from dataclasses import replace

import pytest
from machines import SPECS, machine

from launch.backends.jsrun import render_erf
from launch.backends.mpirun import build_mpirun
from launch.cluster.hosts import Host, HostShare, share_ranks
from launch.cluster.planner import build_job, plan_shares
from launch.installed.mpi_flavour import MpiFlavour
from launch.model.cluster_settings import ClusterSettings, has_allocation, settings_env
from launch.model.errors import PlanError
from launch.model.settings import PlanSettings
from launch.plan_host.planner import HostRequest

REQUEST = HostRequest(("train.py", "--epochs", "3"), 1, 12, environ={"PATH": "/bin", "HOME": "/root"})
SHARES = (HostShare("a", 0, 6), HostShare("b", 6, 6))


def test_alike_hosts_get_the_same_plan() -> None:
    model = machine(SPECS["dgx"])
    planned = plan_shares(SHARES, lambda host: model, REQUEST)
    assert [rank.rank for rank in planned.ranks] == list(range(12))
    first, second = planned.ranks[:6], planned.ranks[6:]
    for one, other in zip(first, second, strict=True):
        assert (one.host, other.host) == ("a", "b")
        assert (one.cpus, one.mem_nodes, one.gpu) == (other.cpus, other.mem_nodes, other.gpu)
        assert other.env["RANK"] == str(one.rank + 6)
        assert "LMSRUN_EXPECT" not in other.env, "a rank decides its binding on its own machine"


def test_a_warning_names_all_hosts_that_it_is_about() -> None:
    machines = {name: machine(SPECS["dgx"]) for name in "abcd"}

    def said(*ranks: int) -> list[str]:
        shares = [HostShare(name, 0, count) for name, count in zip("abcd", ranks, strict=False)]
        warnings = plan_shares(shares, machines.__getitem__, REQUEST).warnings
        return [line.partition(": GPU memory")[0] for line in warnings if "GPU memory cannot be read" in line]

    assert said(2, 2, 2) == ["each host: local ranks 0-1"]
    assert said(2, 2, 1) == ["a and 1 other host: local ranks 0-1", "c: local rank 0"]
    assert said(2, 2, 2, 1) == ["a and 2 other hosts: local ranks 0-1", "d: local rank 0"]


def test_mixed_hosts_are_legal_and_said() -> None:
    machines = {"a": machine(SPECS["dgx"]), "b": machine(SPECS["ac922"])}
    planned = plan_shares((HostShare("a", 0, 6), HostShare("b", 6, 4)), machines.__getitem__, REQUEST)
    assert planned.ranks[0].cpus != planned.ranks[6].cpus
    assert {warning.partition(":")[0] for warning in planned.warnings} <= {"a", "b"}
    with pytest.raises(PlanError, match="b"):
        plan_shares((HostShare("a", 0, 6), HostShare("b", 6, 99)), machines.__getitem__, REQUEST)


def test_ranks_elsewhere_get_the_options_as_variables() -> None:
    settings = ClusterSettings(
        numa="strict", gpu_memory_bytes=16 << 30, host_mem_reserve=0.25, hosts="a:6,b:6"
    )
    env = settings_env(settings)
    assert PlanSettings.from_env(env) == PlanSettings(
        numa="strict", gpu_memory_bytes=16 << 30, host_mem_reserve=0.25
    )
    assert "LMSRUN_HOSTS" not in env
    job = build_job(
        SHARES,
        settings,
        replace(REQUEST, program=("t.py", ":")),
        {"PATH": "/bin"},
        (),
        only_here=False,
        tag_output=None,
    )
    assert job.worker[-4:] == ("--escaped", "--", "t.py", "%3A")
    assert job.env["LMSRUN_NUMA"] == "strict" and job.env["MASTER_ADDR"] == "a"
    assert {"PATH", "LMSRUN_JOB_ID", "LMSRUN_RECEIPT_LINES"} <= set(job.names)
    assert "LMSRUN_RECEIPT_DIR" not in job.names, "that folder is on this host"
    assert job.tag_output


def test_an_allocation_is_noticed_cheaply() -> None:
    assert has_allocation({"SLURM_JOB_NODELIST": "a"}) and not has_allocation({"PATH": "/bin"})


def test_summit_is_planned_in_two_seconds_and_500_mb() -> None:
    """4,608 hosts x 6 GPUs. The limit of the issue is 2 s; this machine may be busy, so CPU time counts."""
    hosts = tuple(Host(f"h{number:04d}", 6) for number in range(4608))
    model = machine(SPECS["dgx"])
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    shares = share_ranks(hosts, None)
    request = replace(REQUEST, world_size=27648)
    planned = plan_shares(shares, lambda host: model, request)
    job = build_job(
        shares, ClusterSettings(), request, {"PATH": "/bin"}, (), only_here=False, tag_output=None
    )
    command = build_mpirun("mpirun", MpiFlavour("openmpi", (4,)), job, "/run")
    erf = render_erf(planned.ranks)
    took = time.process_time() - started
    grown_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert len(planned.ranks) == 27648
    assert took < 2
    assert grown_kb < 500_000
    assert len(erf) < 100 * 27648, "linear size"
    assert max(map(len, command.argv)) < 128 << 10, "the kernel's limit of one argument"
