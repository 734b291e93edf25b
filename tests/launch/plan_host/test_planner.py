"""The plan of one host as a value: ranks of a larger job, environments, what a user decided."""

import json
import time
from dataclasses import replace
from typing import Any

import machines
import pytest

from launch.backends.local import plan_local_job
from launch.model.errors import PlanError, UsageError
from launch.model.settings import PlanSettings
from launch.plan_host.planner import MOST_RANKS, HostPlan, HostRequest, plan_host
from launch.plan_host.rank_env import parse_forward
from lms.config import LMSConfig

AC922 = machines.machine("ac922")


def plan(count: int = 4, **request: object) -> HostPlan:
    known: dict[str, object] = {"program": ("train.py",), "local_world_size": count, "world_size": count}
    return plan_host(AC922, HostRequest(**{**known, **request}))  # type: ignore[arg-type]


def test_a_rank_starts_the_shim_behind_its_binding() -> None:
    rank = plan(shim=("py", "shim", "worker", "--"), program=("a b.py", "$(x)")).ranks[1]
    assert rank.argv == (
        "numactl", "--physcpubind=32-63", "--membind=0", "py", "shim", "worker", "--", "a b.py", "$(x)"
    )  # fmt: skip


def test_the_expectation_is_what_the_argv_binds() -> None:
    for rank in plan().ranks:
        expected = json.loads(rank.env["LMSRUN_EXPECT"])
        assert f"--physcpubind={expected['cpus']}" == rank.argv[1]
        assert f"--membind={expected['mem_nodes']}" == rank.argv[2]
        assert (expected["rank"], expected["bind_method"], expected["numa"]) == (rank.rank, "numactl", "auto")
        assert rank.gpu is not None
        assert expected["gpu"] == rank.gpu.pci_bus_id


def test_ranks_of_a_second_host() -> None:
    ranks = plan(2, world_size=6, first_rank=4, host="b").ranks
    assert [(rank.rank, rank.local_rank, rank.host) for rank in ranks] == [(4, 0, "b"), (5, 1, "b")]
    assert [ranks[1].env[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")] == list(
        "5162"
    )


def test_threads_follow_the_cores_unless_the_user_says() -> None:
    env = plan(environ={"OMP_NUM_THREADS": "1"}, given={"TF_NUM_INTEROP_THREADS": "7"}).ranks[0].env
    assert "OMP_NUM_THREADS" not in env
    assert (env["TF_NUM_INTRAOP_THREADS"], env["TF_NUM_INTEROP_THREADS"]) == ("8", "7")
    assert env["HOROVOD_THREAD_AFFINITY"] == "31,63,95,127"


def test_nothing_is_pinned_when_nothing_is_bound() -> None:
    rank = plan(settings=PlanSettings(numa="off")).ranks[0]
    assert "HOROVOD_THREAD_AFFINITY" not in rank.env
    assert (rank.cpus, rank.mem_policy, rank.argv[0]) == (frozenset(), "none", rank.argv[0])
    assert rank.env["OMP_NUM_THREADS"] == "8"


def test_both_names_of_the_limit_and_our_own() -> None:
    env = plan().ranks[0].env
    names = ("TF_GPU_HOST_MEM_LIMIT_IN_MB", "TF_CUDA_HOST_MEM_LIMIT_IN_MB", "LMS_HOST_MEM_LIMIT_MB")
    assert [env[name] for name in names] == ["65536"] * 3


def test_a_limit_in_the_lms_config_is_the_limit() -> None:
    assert plan(lms=LMSConfig(enabled=True, host_mem_limit_mb=20000)).ranks[0].host_mem_limit_mb == 20000
    both = plan(lms=LMSConfig(host_mem_limit_mb=20000), settings=PlanSettings(host_mem_limit_mb=30000))
    assert both.ranks[0].host_mem_limit_mb == 30000


def test_lms_off_is_said_to_the_rank() -> None:
    assert plan(lms=LMSConfig()).ranks[0].env["LMS_ENABLED"] == "0"


def test_the_jobs_gpus_are_named_as_they_are_made_visible() -> None:
    env = plan(2, settings=PlanSettings(gpus="1,3")).ranks[0].env
    assert env["LMSRUN_GPUS"] == env["CUDA_VISIBLE_DEVICES"]
    assert env["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert plan(2, settings=PlanSettings(gpus="none")).ranks[0].env["LMSRUN_GPUS"] == ""


@pytest.mark.parametrize(
    ("variable", "settings"),
    [
        ("CUDA_VISIBLE_DEVICES=2,3", {}),
        ("CUDA_VISIBLE_DEVICES=3,2", {"gpus": "3"}),
        ("CUDA_VISIBLE_DEVICES=2", {"gpus": "none"}),
        ("CUDA_VISIBLE_DEVICES=", {}),
        ("CUDA_DEVICE_ORDER=FASTEST_FIRST", {}),
        ("TF_GPU_HOST_MEM_LIMIT_IN_MB=200", {}),
        ("TF_GPU_HOST_MEM_LIMIT_IN_MB=200", {"host_mem_limit_mb": 100}),
        ("TF_CUDA_HOST_MEM_LIMIT_IN_MB=none", {}),
        ("OMP_NUM_THREADS=1", {"omp_places": "cores"}),
        ("LMS_ENABLED=1", {}),
    ],
)
def test_a_given_variable_counts_as_an_exported_one(variable: str, settings: dict[str, Any]) -> None:
    name, _, value = variable.partition("=")
    asked = PlanSettings(**settings)
    exported = plan(1, settings=asked, environ={name: value, "HOME": "/root"})
    given = plan(1, settings=asked, environ={name: "of the shell", "HOME": "/root"}, given={name: value})
    assert given.warnings == exported.warnings
    for there, here in zip(exported.ranks, given.ranks, strict=True):
        assert replace(here, env={}) == replace(there, env={})
        assert {name: "of the shell", **here.env} == {name: value, **there.env}


def test_ranks_are_planned_for_the_gpus_that_a_given_variable_shows() -> None:
    ranks = plan(2, given={"CUDA_VISIBLE_DEVICES": "2,3"}).ranks
    assert [rank.gpu for rank in ranks] == list(AC922.gpus[2:])
    assert {rank.env["CUDA_VISIBLE_DEVICES"] for rank in ranks} == {ranks[0].env["LMSRUN_GPUS"]}
    assert ranks[0].env["LMSRUN_GPUS"] == ",".join(gpu.uuid or "?" for gpu in AC922.gpus[2:])
    hidden = {"settings": PlanSettings(gpus="0"), "given": {"CUDA_VISIBLE_DEVICES": "2,3"}}
    with pytest.raises(PlanError, match="--gpus names '0', which CUDA_VISIBLE_DEVICES hides"):
        plan(1, **hidden)


def test_commands_of_the_local_launcher() -> None:
    job = plan_local_job(AC922, HostRequest(("t.py",), 4, 4))
    assert job.commands == tuple(rank.argv for rank in job.ranks)
    assert (job.launcher, job.world_size) == ("local", 4)


def test_more_ranks_than_slots() -> None:
    with pytest.raises(PlanError, match="5 ranks do not fit on localhost with 4 GPUs; try -np 4"):
        plan(5)
    assert len(plan(5, settings=PlanSettings(oversubscribe=True)).ranks) == 5


def test_forwarding() -> None:
    given, names, warnings = parse_forward(["A=1=2", "B", "C", "D="], {"B": "secret"})
    assert (given, names) == ({"A": "1=2", "D": ""}, ("B",))
    assert warnings == ["-x C: C is not set here, so it is not handed on"]
    reserved = ("LMSRUN_EXPECT=x", "LOCAL_RANK", "HOROVOD_HOSTNAME=x", "HOROVOD_GLOO_RENDEZVOUS_PORT=1")
    for bad in ("1A=2", "a b", "", "LMSRUN_RECEIPT_LINES=1", "LMSRUN_RENDEZVOUS_PORT=1", *reserved):
        with pytest.raises(UsageError):
            parse_forward([bad], {})
    for bad in ("C D", "LOCAL_RANK"):
        with pytest.raises(UsageError, match="^LMSRUN_FORWARD "):
            parse_forward([bad], {}, "LMSRUN_FORWARD")


def test_many_ranks_on_one_host_are_planned_at_once_or_refused() -> None:
    settings = PlanSettings(oversubscribe=True, host_mem_limit_mb=1)
    started = time.process_time()
    ranks = plan(MOST_RANKS, settings=settings).ranks
    assert time.process_time() - started < 10, "before, each rank was held against all others: 25 s"
    assert len({rank.env["HOROVOD_THREAD_AFFINITY"] for rank in ranks}) == 1 and len(ranks) == MOST_RANKS
    with pytest.raises(PlanError, match=r"8193 ranks are to run on localhost, needed at most 8192 a host"):
        plan(MOST_RANKS + 1, settings=settings)
