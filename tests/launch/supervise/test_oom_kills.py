"""What the kernel says of memory when a rank is killed."""

from pathlib import Path

from launch.discover.tree import DirTree
from launch.model.plan import RankPlan
from launch.model.topology import Gpu
from launch.supervise.oom_kills import MemoryCounters, explain_memory, read_memory_counters

RANK = RankPlan(
    1, 1, "node7", Gpu(1, "0004:05:00.0"), 8, frozenset({0}), "none", frozenset(), None, {}, ("true",)
)
BOUND = RankPlan(1, 1, "node7", None, 8, frozenset({0}), "bind", frozenset({8}), None, {}, ("true",))


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
    assert explain_memory(empty, empty, RANK) == "; often that is the kernel's out-of-memory killer"
    assert read_memory_counters().kills.keys() <= {"the machine's memory", "the cgroup's memory limit"}
