"""A new job takes what is free, and says what it shares."""

from dataclasses import replace

import machines

from launch.discover.saved import from_json, to_json
from launch.model.busy import Busy, GpuUse, RunningJob, busy_to_text, parse_busy
from launch.model.idset import format_ids, parse_ids
from launch.model.settings import PlanSettings
from launch.model.topology import Limits
from launch.plan_host.planner import HostPlan, HostRequest, plan_free_slots, plan_host

AC922 = machines.machine("ac922")
FIRST = RunningJob("job a.py (process 7)", parse_ids("0-15"), frozenset({AC922.gpus[0].pci_bus_id}))


def plan(busy: Busy, ranks: int, gpus: str = "auto") -> HostPlan:
    settings = PlanSettings(gpus=gpus, gpu_memory_bytes=1 << 30)
    return plan_host(AC922, HostRequest(("t.py",), ranks, ranks, busy=busy, settings=settings))


def test_free_gpus_come_first_and_the_ranks_see_no_others() -> None:
    (rank,) = plan(Busy((FIRST,)), 1).ranks
    assert rank.gpu == AC922.gpus[1]
    token = AC922.gpus[1].uuid or "1"
    assert (rank.env["CUDA_VISIBLE_DEVICES"], rank.env["LMSRUN_GPUS"]) == (token, token)


def test_free_cores_of_the_gpus_node_come_first() -> None:
    (rank,) = plan(Busy((FIRST,)), 1).ranks
    assert format_ids(rank.cpus) == "16-63"
    assert not any("shared" in said for said in plan(Busy((FIRST,)), 1).warnings)


def test_what_is_shared_is_said_with_whom() -> None:
    everything = RunningJob(
        "job b.py (process 8)", AC922.allowed.cpus, frozenset(gpu.pci_bus_id for gpu in AC922.gpus)
    )
    planned = plan(Busy((everything,)), 2)
    alone = plan(Busy(), 2)
    assert [rank.cpus for rank in planned.ranks] == [rank.cpus for rank in alone.ranks]
    shared = [said for said in planned.warnings if "shared" in said]
    assert shared == [
        "ranks 0-1: its GPU is shared with job b.py (process 8)",
        f"rank 0: CPUs {format_ids(planned.ranks[0].cpus)} are shared with job b.py (process 8)",
        f"rank 1: CPUs {format_ids(planned.ranks[1].cpus)} are shared with job b.py (process 8)",
    ]


def test_a_gpu_that_nvml_shows_in_use_is_taken_last() -> None:
    uses = tuple(GpuUse(gpu.pci_bus_id, 3 << 30, 2) for gpu in AC922.gpus[:3])
    (rank,) = plan(Busy(uses=uses), 1).ranks
    assert rank.gpu == AC922.gpus[3]
    shared = plan(Busy(uses=uses), 2)
    assert [rank.gpu for rank in shared.ranks] == [AC922.gpus[0], AC922.gpus[3]]
    assert "rank 0: its GPU is shared with 2 other programs, 3.0 GiB of its memory in use" in shared.warnings


def test_auto_starts_what_is_free_and_everything_where_nothing_is() -> None:
    settings = PlanSettings()
    assert plan_free_slots(AC922, settings, {}, Busy((FIRST,))) == (
        3,
        ("1 of 4 GPUs are in use: -np auto is 3 here",),
    )
    everything = RunningJob("b", AC922.allowed.cpus, frozenset(gpu.pci_bus_id for gpu in AC922.gpus))
    assert plan_free_slots(AC922, settings, {}, Busy((everything,))) == (4, ())
    cores = plan_free_slots(AC922, replace(settings, gpus="none"), {}, Busy((FIRST,)))
    assert cores[0] == 28


def test_cpu_ranks_go_where_cores_are_free() -> None:
    one_node = RunningJob("a", parse_ids("0-63"))
    planned = plan(Busy((one_node,)), 2, gpus="none")
    assert [rank.numa_node for rank in planned.ranks] == [8, 8]


def test_ranks_of_another_launcher_are_told_the_same() -> None:
    busy = Busy((FIRST,), (GpuUse("0000:05:00.0", 1, 0),))
    assert parse_busy(busy_to_text(busy)) == busy


def test_of_other_jobs_only_what_the_machine_has_is_told() -> None:
    """Anybody may write notes on the board of a host."""
    known = AC922.gpus[0].pci_bus_id or ""
    odd = RunningJob("odd", parse_ids("0-3,9000-9100"), frozenset({known, *(f"GPU-{i}" for i in range(256))}))
    foreign = RunningJob("foreign", frozenset(), frozenset({"GPU-none"}))
    (job,) = Busy((odd, foreign)).on(AC922).jobs
    assert job == RunningJob("odd", parse_ids("0-3"), frozenset({known}))
    cpus = parse_ids(",".join(map(str, range(0, 128, 2))))
    told = busy_to_text(Busy(tuple(RunningJob(f"job {i}", cpus) for i in range(1000))))
    assert len(told) < 32_768 and parse_busy(told).cpus == cpus


def test_threads_and_auto_follow_the_time_that_cgroups_give() -> None:
    short = replace(AC922, limits=Limits(cpu_millis=6500))
    assert from_json(to_json(short)).limits == short.limits
    made = plan_host(short, HostRequest(("t.py",), 2, 2, settings=PlanSettings(gpus="none")))
    assert {rank.env["OMP_NUM_THREADS"] for rank in made.ranks} == {"3"}
    said = "the cgroup gives this job the time of 6 CPUs: a rank computes with 3 threads, not "
    assert any(said in warning for warning in made.warnings)
    slots, (why,) = plan_free_slots(short, PlanSettings(gpus="none"), {}, Busy())
    assert slots == 6 and "-np auto is 6 here" in why
    assert plan_free_slots(short, PlanSettings(), {}, Busy()) == (4, ())
