"""Why a rank ended, as far as wait statuses and the kernel's counters tell."""

import signal
from pathlib import Path

import pytest

from launch.discover.tree import DirTree
from launch.model.plan import RankPlan
from launch.model.topology import Gpu
from launch.supervise.oom_kills import MemoryCounters, explain_memory, read_memory_counters
from launch.supervise.termination import plan_signals
from launch.system.exit_status import describe_rank, describe_status, exit_code_of, explain_crash

RANK = RankPlan(
    1, 1, "node7", Gpu(1, "0004:05:00.0"), 8, frozenset({0}), "none", frozenset(), None, {}, ("true",)
)
BOUND = RankPlan(1, 1, "node7", None, 8, frozenset({0}), "bind", frozenset({8}), None, {}, ("true",))


@pytest.mark.parametrize(
    ("status", "text", "code"),
    [
        (7 << 8, "exited with code 7", 7),
        (255 << 8, "exited with code 255", 255),
        (signal.SIGKILL, "was killed by SIGKILL (signal 9)", 137),
        (signal.SIGSEGV | 0x80, "was killed by SIGSEGV (signal 11), core dumped", 139),
        (40, "was killed by signal 40 (signal 40)", 168),
    ],
)
def test_statuses(status: int, text: str, code: int) -> None:
    assert describe_status(status) == text
    assert exit_code_of(status) == code


LIMITED = {"TF_CPU_ALLOCATOR_USE_BFC": "true", "TF_CPU_BFC_MEM_LIMIT_IN_MB": "300"}
ACTIVE = {"lms": {"active": True}}


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT])
def test_a_crash_at_the_limit_of_the_cpu_device_may_be_for_want_of_memory(number: int) -> None:
    why = explain_crash(number, LIMITED, ACTIVE)
    assert why.startswith("; at the limit of the CPU device (TF_CPU_BFC_MEM_LIMIT_IN_MB=300) oneDNN may end")
    assert "LMS_MARGIN=0.2" in why and "LMS_POLICY=all" in why


@pytest.mark.parametrize(
    ("status", "environ", "framework"),
    [
        (signal.SIGTERM, LIMITED, ACTIVE),
        (1 << 8, LIMITED, ACTIVE),
        (signal.SIGSEGV, {}, ACTIVE),
        (signal.SIGSEGV, {"TF_CPU_BFC_MEM_LIMIT_IN_MB": "300"}, ACTIVE),
        (signal.SIGSEGV, LIMITED, {"lms": {"active": False}}),
        (signal.SIGSEGV, LIMITED, {}),
    ],
)
def test_other_ends_get_no_such_advice(
    status: int, environ: dict[str, str], framework: dict[str, object]
) -> None:
    assert explain_crash(status, environ, framework) == ""


def test_ranks_are_named_with_host_and_gpu() -> None:
    assert describe_rank(RANK) == "rank 1 on node7 (GPU 0004:05:00.0)"
    assert describe_rank(BOUND) == "rank 1 on node7 (no GPU)"


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_cgroup_version_2(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "0::/job.slice\n")
    write(tmp_path, "proc/vmstat", "nr_free_pages 5\noom_kill 3\n")
    write(tmp_path, "sys/fs/cgroup/job.slice/memory.events", "low 0\nmax 4\noom 1\noom_kill 1\n")
    before = read_memory_counters(DirTree(str(tmp_path)))
    write(tmp_path, "proc/vmstat", "oom_kill 4\n")
    write(tmp_path, "sys/fs/cgroup/job.slice/memory.events", "max 9\noom_kill 2\n")
    after = read_memory_counters(DirTree(str(tmp_path)))
    assert explain_memory(before, after, RANK) == (
        "; the kernel's out-of-memory killer struck (the cgroup's memory limit)"
    )
    assert explain_memory(before, after, BOUND) == explain_memory(before, after, RANK)


def test_a_bound_rank_that_the_machine_killed_gets_a_hint() -> None:
    before, after = MemoryCounters({"the machine's memory": 0}), MemoryCounters({"the machine's memory": 1})
    assert explain_memory(before, after, RANK) == (
        "; the kernel's out-of-memory killer struck (the machine's memory)"
    )
    assert "bound to node 8, try --mem-policy preferred" in explain_memory(before, after, BOUND)


def test_cgroup_version_1_in_a_container(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "9:name=systemd:/\n4:cpu,memory:/docker/x\n0::/\n")
    write(
        tmp_path, "sys/fs/cgroup/memory/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 0\n"
    )
    write(tmp_path, "sys/fs/cgroup/memory/memory.failcnt", "1\n")
    before = read_memory_counters(DirTree(str(tmp_path)))
    assert before == MemoryCounters({"the cgroup's memory limit": 0}, 1)
    write(tmp_path, "sys/fs/cgroup/memory/memory.failcnt", "5\n")
    after = read_memory_counters(DirTree(str(tmp_path)))
    assert explain_memory(before, after, RANK) == "; the cgroup ran into its memory limit meanwhile"
    assert explain_memory(after, after, RANK) == ""


def test_version_2_without_a_cgroup_namespace_shows_the_mounts_own_cgroup(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "0::/system.slice/docker-x.scope\n")
    write(
        tmp_path,
        "proc/self/mountinfo",
        "31 30 0:26 /system.slice/docker-x.scope /sys/fs/cgroup ro - cgroup2 cgroup rw\n",
    )
    write(tmp_path, "sys/fs/cgroup/memory.events", "max 4\noom_kill 1\n")
    assert read_memory_counters(DirTree(str(tmp_path))) == MemoryCounters({"the cgroup's memory limit": 1}, 4)


def test_a_machine_that_shows_nothing(tmp_path: Path) -> None:
    empty = read_memory_counters(DirTree(str(tmp_path)))
    assert empty == MemoryCounters()
    assert explain_memory(empty, empty, RANK) == ""
    assert read_memory_counters().kills.keys() <= {"the machine's memory", "the cgroup's memory limit"}


def test_the_ladder_climbs_to_sigkill_within_the_grace_period() -> None:
    assert plan_signals(signal.SIGTERM, 10) == [(0, signal.SIGTERM), (10, signal.SIGKILL)]
    assert plan_signals(signal.SIGINT, 10) == [(0, signal.SIGINT), (5, signal.SIGTERM), (10, signal.SIGKILL)]
