"""Limits beyond the hardware, as cgroup v1 and v2 and containers show them."""

import ctypes
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from launch.discover import limits
from launch.discover.limits import probe_set_mempolicy, read_cpuset, read_limits
from launch.discover.tree import MemoryTree
from launch.system import numa_policy

GIB = 1 << 30
REPOSITORY = Path(__file__).resolve().parents[3]


def memory_limit(files: dict[str, str]) -> int | None:
    tree = MemoryTree({path: text.encode() for path, text in files.items()})
    return read_limits(tree, set_mempolicy=None).memory_bytes


V2 = "31 23 0:28 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw"


def test_v2_takes_the_tightest_on_the_way_up() -> None:
    assert memory_limit(
        {
            "proc/self/cgroup": "0::/slurm/job_1/step_0",
            "proc/self/mountinfo": V2,
            "sys/fs/cgroup/slurm/job_1/step_0/memory.max": "max",
            "sys/fs/cgroup/slurm/job_1/memory.max": str(8 * GIB),
            "sys/fs/cgroup/slurm/memory.max": str(9 * GIB),
            "sys/fs/cgroup/other/memory.max": "1",
        }
    ) == (8 * GIB)


def test_v1_and_its_way_to_write_no_limit() -> None:
    files = {
        "proc/self/cgroup": "5:cpuset:/a\n4:memory:/a/b\n0::/",
        "proc/self/mountinfo": (
            "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
            "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw"
        ),
        "sys/fs/cgroup/memory/a/b/memory.limit_in_bytes": "9223372036854771712",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
    }
    assert memory_limit(files) is None
    assert memory_limit(files | {"sys/fs/cgroup/memory/a/memory.limit_in_bytes": str(GIB)}) == GIB


def test_a_hierarchy_mounted_at_the_top_ends() -> None:
    files = {"proc/self/cgroup": "0::/a", "proc/self/mountinfo": "31 23 0:28 / / rw - cgroup2 cgroup2 rw"}
    assert memory_limit(files | {"a/memory.max": str(GIB), "memory.max": str(2 * GIB)}) == GIB
    assert memory_limit(files | {"proc/self/cgroup": "0::/"}) is None


def test_both_tables_of_system_calls_agree() -> None:
    assert limits.SET_MEMPOLICY == numa_policy._SET_MEMPOLICY
    assert not set(numa_policy._GET_MEMPOLICY.items()) & set(limits.SET_MEMPOLICY.items())


@pytest.mark.parametrize(
    ("root", "cgroup"),
    [
        ("/docker/abc", "/docker/abc"),  # the host's path, the container's own cgroup mounted
        ("/", "/"),  # a cgroup namespace
        ("/docker/abc", "/../other"),  # outside the namespace
    ],
)
def test_containers(root: str, cgroup: str) -> None:
    assert (
        memory_limit(
            {
                "proc/self/cgroup": f"0::{cgroup}",
                "proc/self/mountinfo": f"31 23 0:28 {root} /sys/fs/cgroup ro - cgroup2 cgroup rw",
                "sys/fs/cgroup/memory.max": str(GIB),
            }
        )
        == GIB
    )


def test_nothing_known_is_no_limit() -> None:
    assert memory_limit({"proc/self/cgroup": "garbage", "proc/self/mountinfo": "x"}) is None


def test_memlock() -> None:
    line = "Max locked memory         8388608              8388608              bytes"
    assert (
        read_limits(MemoryTree({"proc/self/limits": line.encode()}), set_mempolicy=None).memlock_bytes
        == 8388608
    )
    unlimited = line.replace("8388608", "unlimited").encode()
    assert read_limits(MemoryTree({"proc/self/limits": unlimited}), set_mempolicy=None).memlock_bytes is None


def test_cpuset_of_a_gathered_machine() -> None:
    files = {
        "proc/self/cgroup": b"7:cpuset:/job\n",
        "sys/fs/cgroup/cpuset/job/cpuset.cpus": b"4-7\n",
        "sys/fs/cgroup/cpuset/job/cpuset.mems": b"0\n",
        "sys/fs/cgroup/cpuset/job/cpuset.effective_cpus": b"0-87\n",
    }
    assert read_cpuset(MemoryTree(files)) == {"cpus": {4, 5, 6, 7}, "mems": {0}}
    v2 = {
        "proc/self/cgroup": b"0::/job\n",
        "sys/fs/cgroup/job/cpuset.cpus": b"\n",
        "sys/fs/cgroup/cpuset.cpus.effective": b"0-3\n",
    }
    assert read_cpuset(MemoryTree(v2)) == {"cpus": {0, 1, 2, 3}, "mems": None}


def test_the_probe_changes_no_policy() -> None:
    def policy() -> tuple[int, int]:
        mode = ctypes.c_int(-1)
        libc = ctypes.CDLL(None, use_errno=True)
        numbers = {"x86_64": 239, "aarch64": 236, "ppc64le": 260}
        result = libc.syscall(numbers[platform.machine()], ctypes.byref(mode), None, 0, None, 0)
        return result, mode.value

    before = policy()
    assert probe_set_mempolicy(platform.machine()) in (True, False)
    assert policy() == before


def test_the_probe_does_not_guess() -> None:
    assert probe_set_mempolicy("vax") is None


UNDER_SECCOMP = """
import ctypes, struct, sys
from launch.discover.limits import SET_MEMPOLICY, probe_set_mempolicy
# Load the number of the system call; EPERM if it is set_mempolicy, else allow: Docker's default in short.
program = b"".join(struct.pack("HBBI", *line) for line in (
    (0x20, 0, 0, 0), (0x15, 0, 1, SET_MEMPOLICY[sys.argv[1]]),
    (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7FFF0000)
))
buffer = ctypes.create_string_buffer(program, len(program))
header = ctypes.create_string_buffer(struct.pack("HxxxxxxP", 4, ctypes.addressof(buffer)))
libc = ctypes.CDLL(None, use_errno=True)
if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, header, 0, 0):
    sys.exit("no seccomp here")
print(probe_set_mempolicy(sys.argv[1]))
"""


def test_a_container_that_forbids_policies() -> None:
    """Trap 4: EPERM from the filter is told from the kernel's own EINVAL."""
    argv = [sys.executable, "-c", UNDER_SECCOMP, platform.machine()]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, cwd=REPOSITORY)
    if "no seccomp here" in done.stderr:
        pytest.skip("this kernel takes no seccomp filter")
    assert (done.stdout, done.stderr) == ("False\n", "")


def cpu_millis(files: dict[str, str]) -> int | None:
    tree = MemoryTree({path: text.encode() for path, text in files.items()})
    return read_limits(tree, set_mempolicy=None).cpu_millis


def test_a_quota_of_cpu_time_is_the_tightest_on_the_way_up() -> None:
    v2 = {"proc/self/cgroup": "0::/a/b", "proc/self/mountinfo": V2, "sys/fs/cgroup/a/b/cpu.max": "max 100000"}
    assert cpu_millis(v2) is None
    assert cpu_millis(v2 | {"sys/fs/cgroup/a/cpu.max": "150000 100000"}) == 1500
    assert cpu_millis(v2 | {"sys/fs/cgroup/a/cpu.max": "9" * 5000 + " 0"}) is None
    v1 = {
        "proc/self/cgroup": "5:cpu,cpuacct:/a",
        "proc/self/mountinfo": "35 31 0:32 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct",
        "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_quota_us": "-1",
        "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_period_us": "100000",
    }
    assert cpu_millis(v1) is None
    assert cpu_millis(v1 | {"sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_quota_us": "200000"}) == 2000
