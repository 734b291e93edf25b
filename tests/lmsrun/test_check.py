"""``lmsrun check`` on machines that are not this one, and its word against Horovod's own on this one."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from launch.discover.tree import MemoryTree
from launch.system.job_board import JobBoard
from lmsrun import check

LOCKED_64K = MemoryTree({"proc/self/limits": b"Max locked memory  65536  65536  bytes"}, {})
UNLIMITED = b"Max locked memory         unlimited            unlimited            bytes\n"
HOROVOD = b"..HOROVOD_GLOO_RENDEZVOUS_ADDR..MPI_Allreduce..libmpi.so.40.."


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """Installed packages as far as the check looks into them."""
    files = {
        "tensorflow/python/platform/build_info.py": b"('cuda_version', '12.5.1'), ('is_cuda_build', True)",
        "tensorflow/python/framework/config.py": b"",
        "horovod/metadata.json": b'{"tensorflow": "2.21.0", "dummy": "none"}',
        "horovod/tensorflow/mpi_lib.cpython-311.so": HOROVOD,
    }
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    return tmp_path


@pytest.fixture
def healthy(site: Path, tmp_path: Path) -> check.Around:
    versions = {"py-libnuma": "1.2", "tensorflow": "2.21.0", "horovod": "0.28.1"}
    return check.Around(
        tree=MemoryTree(
            {
                "proc/self/limits": UNLIMITED,
                "proc/self/status": b"Mems_allowed_list:\t0,8\n",
                "sys/devices/system/cpu/online": b"0-3",
                "sys/devices/system/node/node0/cpulist": b"0-3",
            },
            {},
        ),
        environ={},
        cpus=frozenset(range(4)),
        which=lambda name: None if name == "mpirun" else f"/usr/bin/{name}",
        version=versions.get,
        folder=lambda name: site / name,
        loads=lambda library: True,
        nvml=None,
        set_mempolicy=True,
        name="node7",
        resolve={"node7": "10.0.0.7"}.get,
        board=JobBoard((tmp_path / "jobs",)),
    )


def find(around: check.Around, name: str) -> check.Finding:
    (found,) = (finding for finding in check.check(around) if finding.name == name)
    return found


def test_a_healthy_machine_is_said_to_be_one(
    healthy: check.Around, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check.report(False, healthy) == 0
    assert capsys.readouterr().out == (
        "ok      machine        1 NUMA node, 4 cores\n"
        "ok      numactl        /usr/bin/numactl\n"
        "ok      libnuma        py-libnuma 1.2, libnuma.so.1 loads\n"
        "ok      memory policy  this process may set one\n"
        "ok      cpuset         CPUs 0-3, memory nodes 0,8\n"
        "ok      cgroup memory  no limit\n"
        "ok      memlock        unlimited\n"
        "ok      GPUs           none: ranks run on the CPUs\n"
        "ok      other jobs     none runs here\n"
        "ok      host name      node7 is 10.0.0.7\n"
        "ok      TensorFlow     2.21.0, built for CUDA 12.5.1\n"
        "ok      Horovod        0.28.1 with Gloo, MPI, built for TensorFlow 2.21.0\n"
        "warn    MPI            no mpirun: only needed for --launcher mpirun; "
        "try: apt-get install openmpi-bin\n"
    )


def test_json_says_the_same(healthy: check.Around, capsys: pytest.CaptureFixture[str]) -> None:
    assert check.report(True, healthy) == 0
    table = json.loads(capsys.readouterr().out)
    assert (table["schema"], table["ok"]) == ("lmsrun.check/1", True)
    assert table["checks"][-1] == {
        "name": "MPI",
        "status": "warn",
        "detail": "no mpirun: only needed for --launcher mpirun",
        "remedy": "apt-get install openmpi-bin",
    }


@pytest.mark.parametrize(
    ("change", "name", "status", "words"),
    [
        ({"set_mempolicy": False}, "memory policy", "warn", "refused"),
        ({"set_mempolicy": None}, "memory policy", "warn", "unknown"),
        ({"which": lambda name: None}, "numactl", "warn", "not found"),
        ({"version": {"numa": "1.4"}.get}, "libnuma", "warn", "another package"),
        ({"version": {}.get}, "libnuma", "warn", "not found"),
        ({"loads": lambda library: False}, "libnuma", "warn", "without libnuma.so.1"),
        ({"version": {}.get}, "TensorFlow", "missing", "not found"),
        ({"version": {"tensorflow": "2.13.1"}.get}, "TensorFlow", "warn", "2.15 up to"),
        ({"version": {"tensorflow": "2.21.0"}.get}, "Horovod", "warn", "others do"),
        (
            {"version": {"tensorflow": "2.20.0", "horovod": "0.28.1"}.get},
            "Horovod",
            "missing",
            "will not load",
        ),
        (
            {"loads": lambda library: "mpi" not in library},
            "Horovod",
            "missing",
            "libmpi.so.40 cannot be loaded",
        ),
        ({"tree": LOCKED_64K}, "memlock", "warn", "64.0 KiB"),
        ({"resolve": lambda name: None}, "host name", "missing", "node7 leads to no address"),
        ({"which": lambda name: f"/nowhere/{name}"}, "MPI", "warn", "cannot run"),
    ],
)
def test_what_is_wrong_is_named_with_a_remedy(
    healthy: check.Around, change: dict[str, object], name: str, status: str, words: str
) -> None:
    finding = find(dataclasses.replace(healthy, **change), name)  # type: ignore[arg-type]
    assert finding.status == status
    assert words in finding.detail


def test_a_missing_framework_is_exit_1(healthy: check.Around, capsys: pytest.CaptureFixture[str]) -> None:
    assert check.report(False, dataclasses.replace(healthy, folder=lambda name: None)) == 1
    assert "missing TensorFlow" in capsys.readouterr().out


def test_horovod_without_gloo_or_tensorflow(healthy: check.Around, site: Path) -> None:
    (library,) = (site / "horovod" / "tensorflow").iterdir()
    library.write_bytes(b"MPI_Allreduce")
    assert find(healthy, "Horovod").status == "warn"
    library.unlink()
    assert "without TensorFlow" in find(healthy, "Horovod").detail


def test_damaged_metadata_is_unknown_not_a_traceback(healthy: check.Around, site: Path) -> None:
    (site / "horovod" / "metadata.json").write_text("[")
    assert "built for TensorFlow unknown" in find(healthy, "Horovod").detail


def test_native_support_of_an_old_build_is_no_warning(healthy: check.Around, site: Path) -> None:
    (site / "tensorflow/python/framework/config.py").write_text("def set_lms_enabled(enabled):")
    finding = find(dataclasses.replace(healthy, version={"tensorflow": "2.1.2"}.get), "TensorFlow")
    assert (finding.status, finding.detail.endswith("with IBM's Large Model Support")) == ("ok", True)


def test_gpus_without_nvml_are_counted_by_the_driver(healthy: check.Around) -> None:
    files = {"gpus/0000:01:00.0/information": b"Model: X", "version": b"NVRM"}
    tree = MemoryTree({f"proc/driver/nvidia/{name}": content for name, content in files.items()}, {})
    finding = find(dataclasses.replace(healthy, tree=tree), "GPUs")
    assert finding == check.Finding("GPUs", "warn", "1 x X, memory size unknown", "pip install nvidia-ml-py")


@pytest.mark.parametrize(
    ("memory", "status", "detail"),
    [
        ({"mem_info_vram_total": b"68702699520"}, "ok", "1 x MI250X"),
        ({}, "warn", "1 x MI250X, memory size unknown"),
    ],
)
def test_gpus_that_only_the_pci_bus_shows_are_those_that_a_plan_uses(
    healthy: check.Around, memory: dict[str, bytes], status: str, detail: str
) -> None:
    files = {"vendor": b"0x1002", "class": b"0x038000", "product_name": b"MI250X", **memory}
    folder = "sys/bus/pci/devices/0000:c1:00.0"
    tree = MemoryTree({f"{folder}/{name}": content for name, content in files.items()}, {})
    finding = find(dataclasses.replace(healthy, tree=tree), "GPUs")
    assert (finding.status, finding.detail) == (status, detail)
    assert finding.remedy == (None if status == "ok" else "load the driver of amd")


def test_nvmls_masks_are_sized_by_the_machine_not_by_this_process(healthy: check.Around) -> None:
    asked = []

    class Nvml:
        NVMLError = OSError

        def __getattr__(self, name: str) -> object:
            answers = {"nvmlDeviceGetCount": 1, "nvmlDeviceGetName": "V100", "nvmlDeviceGetMigMode": None}
            answers["nvmlDeviceGetMemoryInfo"] = SimpleNamespace(total=1 << 34, used=0)
            answers["nvmlDeviceGetComputeRunningProcesses"] = []
            answers["nvmlDeviceGetPciInfo"] = SimpleNamespace(busId="00000004:05:00.0")
            return lambda *args: (asked.append((name, *args[1:])), answers.get(name))[1]

    tree = MemoryTree({"proc/driver/nvidia/version": b"x", "sys/devices/system/cpu/online": b"0-191"}, {})
    around = dataclasses.replace(healthy, tree=tree, nvml=Nvml())  # type: ignore[arg-type]
    assert find(around, "GPUs").detail == "1 x V100"
    assert ("nvmlDeviceGetCpuAffinity", 3) in asked


def test_cgroup_limit_is_shown(healthy: check.Around) -> None:
    tree = MemoryTree({"proc/self/cgroup": b"0::/", "sys/fs/cgroup/memory.max": b"17179869184"}, {})
    assert (
        find(dataclasses.replace(healthy, tree=tree), "cgroup memory").detail
        == "limit 16.0 GiB, plans keep to it"
    )


@pytest.mark.tensorflow
def test_this_machines_horovod_is_judged_as_horovod_judges_itself(tmp_path: Path) -> None:
    pytest.importorskip("horovod")
    code = "import horovod.tensorflow as h; print(h.gloo_built(), h.mpi_built(), bool(h.nccl_built()))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=True
    )
    said = done.stdout.split()
    detail = find(check.read_around(str(tmp_path)), "Horovod").detail
    assert [str(part in detail) for part in ("Gloo", "MPI", "NCCL")] == said


def test_the_check_imports_no_tensorflow() -> None:
    code = (
        "import sys; from lmsrun import check; check.report(True, check.read_around('/tmp'));"
        "assert 'tensorflow' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode in (0, 1) and "Traceback" not in done.stderr
    assert json.loads(done.stdout)["schema"] == "lmsrun.check/1"


def test_a_machine_that_shows_no_cpu_can_run_nothing(healthy: check.Around) -> None:
    hidden = dataclasses.replace(healthy, tree=MemoryTree({"proc/self/limits": UNLIMITED}, {}))
    found = find(hidden, "machine")
    assert (found.status, found.remedy) == ("missing", "mount /sys, in a container or jail read-only")
    assert "no online CPU in sys/devices/system/cpu" in found.detail
    assert check.report(False, hidden) == 1


def test_running_jobs_are_shown(healthy: check.Around) -> None:
    note = healthy.board.write("train.py", frozenset({0, 1}), frozenset({"0000:04:00.0"}))
    assert note is not None
    found = find(healthy, "other jobs")
    assert found.status == "warn"
    assert found.detail == f"job train.py (process {os.getpid()}) has CPUs 0-1 and GPU 0000:04:00.0"
    note.remove()
    assert find(healthy, "other jobs").status == "ok"


def test_without_a_place_for_running_jobs_none_can_be_seen(healthy: check.Around, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    found = find(dataclasses.replace(healthy, board=JobBoard((tmp_path / "file" / "jobs",))), "other jobs")
    assert (found.status, found.remedy) == ("warn", "--jobs-dir DIR, one that all users can write")
