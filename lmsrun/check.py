"""``lmsrun check``: what is here, what is missing, and the remedy, one line each; imports no TensorFlow."""

import ctypes
import importlib.util
import json
import os
import platform
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Literal

from launch.discover import find_gpus, has_driver
from launch.discover.limits import probe_set_mempolicy, read_limits
from launch.discover.nvml import import_nvml
from launch.discover.sysfs import read_hardware
from launch.discover.tree import DirTree, Tree
from launch.installed.mpi_flavour import read_mpi_flavour
from launch.installed.versions import read_tensorflow_version, read_version
from launch.model.busy import describe_job
from launch.model.errors import LmsrunError, TopologyError
from launch.model.idset import format_ids
from launch.model.text import count_of, name_ids
from launch.preflight.occupancy import read_gpu_uses
from launch.system.job_board import JobBoard, board_folders
from launch.system.own_host_name import REMEDY, resolve_name
from lms.errors import pip_install
from lmsrun.render.topology import format_size

SCHEMA = "lmsrun.check/1"
Status = Literal["ok", "warn", "missing"]

TENSORFLOW_RANGE = ((2, 15), (2, 22))
"""At least the first, below the second: where graph mode's hooks into TensorFlow have been run."""
MAX_LIBRARY_BYTES = 512 << 20


@dataclass(frozen=True)
class Finding:
    """One line. ``missing``: a training run cannot do without; ``warn``: it does worse without."""

    name: str
    status: Status
    detail: str
    remedy: str | None = None


@dataclass(frozen=True)
class Around:
    """Everything the check looks at, so that a test can be any machine.

    Attributes:
        tree: Where ``proc/`` and ``sys/`` are.
        environ: The environment variables.
        cpus: CPUs this process may run on.
        which: Path of a program, or None.
        version: Version of an installed distribution, or None.
        folder: Folder of an installed top-level module, found without importing it, or None.
        loads: Whether a shared library can be loaded.
        nvml: The module ``pynvml``, or None.
        set_mempolicy: Whether the kernel lets this process set a memory policy; None is unknown.
        name: This host's own.
        resolve: The address of a host's name, or None.
        board: Where the running jobs of this machine are written down.
    """

    tree: Tree
    environ: Mapping[str, str]
    cpus: frozenset[int]
    which: Callable[[str], str | None]
    version: Callable[[str], str | None]
    folder: Callable[[str], Path | None]
    loads: Callable[[str], bool]
    nvml: ModuleType | None
    set_mempolicy: bool | None
    name: str
    resolve: Callable[[str], str | None]
    board: JobBoard


def read_around(jobs_dir: str) -> Around:
    """Read this machine and this interpreter; running jobs are written down below ``jobs_dir``."""
    return Around(
        tree=DirTree("/"),
        environ=os.environ,
        cpus=frozenset(os.sched_getaffinity(0)),
        which=shutil.which,
        version=read_version,
        folder=_folder,
        loads=_loads,
        nvml=import_nvml(),
        set_mempolicy=probe_set_mempolicy(platform.machine()),
        name=platform.node(),
        resolve=resolve_name,
        board=JobBoard(board_folders(jobs_dir, os.environ)),
    )


def report(as_json: bool, around: Around, more: tuple[Finding, ...] = ()) -> int:
    """Print the findings, and those made elsewhere; 1 when a training run could not work, else 0."""
    findings = (*check(around), *more)
    works = all(finding.status != "missing" for finding in findings)
    if as_json:
        table = {"schema": SCHEMA, "ok": works, "checks": [asdict(finding) for finding in findings]}
        sys.stdout.write(json.dumps(table, indent=2) + "\n")
    else:
        sys.stdout.write(render(findings))
    return 0 if works else 1


def render(findings: tuple[Finding, ...]) -> str:
    """One line a finding: status, name, detail and what to do about it."""
    width = max(len(finding.name) for finding in findings)
    lines = []
    for finding in findings:
        remedy = f"; try: {finding.remedy}" if finding.remedy else ""
        lines.append(f"{finding.status:<8}{finding.name:<{width + 2}}{finding.detail}{remedy}\n")
    return "".join(lines)


def check(around: Around) -> tuple[Finding, ...]:
    """All findings, in the order in which a rank needs them."""
    looks = (
        _check_machine, _check_numactl, _check_libnuma, _check_mempolicy, _check_cpuset,
        _check_memory_limit, _check_memlock,
        _check_gpus, _check_neighbours, _check_own_name, _check_tensorflow, _check_horovod, _check_mpi,
    )  # fmt: skip
    return tuple(look(around) for look in looks)


def _check_machine(around: Around) -> Finding:
    """Check what every plan begins with; a container or a jail may hide it."""
    try:
        hardware = read_hardware(around.tree)
    except (TopologyError, ValueError) as error:
        return Finding("machine", "missing", str(error), "mount /sys, in a container or jail read-only")
    told = f"{count_of(len(hardware.numa_nodes), 'NUMA node')}, {count_of(len(hardware.cores), 'core')}"
    return Finding("machine", "ok", told)


def _check_numactl(around: Around) -> Finding:
    if path := around.which("numactl"):
        return Finding("numactl", "ok", path)
    return Finding(
        "numactl", "warn", "not found: ranks bind themselves through libnuma", "apt-get install numactl"
    )


def _check_libnuma(around: Around) -> Finding:
    version = around.version("py-libnuma")
    if version is None:
        foreign = around.version("numa")
        detail = (
            f"py-libnuma not found, but numa {foreign}, another package"
            if foreign
            else "py-libnuma not found"
        )
        return Finding(
            "libnuma",
            "warn",
            detail,
            "pip uninstall numa; pip install py-libnuma" if foreign else "pip install py-libnuma",
        )
    if not around.loads("libnuma.so.1"):
        return Finding(
            "libnuma", "warn", f"py-libnuma {version} without libnuma.so.1", "apt-get install libnuma1"
        )
    return Finding("libnuma", "ok", f"py-libnuma {version}, libnuma.so.1 loads")


def _check_mempolicy(around: Around) -> Finding:
    if around.set_mempolicy is None:
        return Finding(
            "memory policy", "warn", "unknown whether this process may set one on this architecture"
        )
    if around.set_mempolicy:
        return Finding("memory policy", "ok", "this process may set one")
    detail = "refused: ranks get CPU binding and first touch only"
    return Finding("memory policy", "warn", detail, "in a container, --cap-add SYS_NICE")


def _check_cpuset(around: Around) -> Finding:
    status = around.tree.read("proc/self/status") or ""
    found = re.search(r"^Mems_allowed_list:\s*(\S+)", status, re.MULTILINE)
    nodes = name_ids("memory node", found[1]) if found else "memory nodes unknown"
    return Finding("cpuset", "ok", f"{name_ids('CPU', format_ids(around.cpus))}, {nodes}")


def _check_memory_limit(around: Around) -> Finding:
    limit = read_limits(around.tree, set_mempolicy=None).memory_bytes
    return Finding(
        "cgroup memory",
        "ok",
        "no limit" if limit is None else f"limit {format_size(limit)}, plans keep to it",
    )


def _check_memlock(around: Around) -> Finding:
    limit = read_limits(around.tree, set_mempolicy=None).memlock_bytes
    if limit is None:
        return Finding("memlock", "ok", "unlimited")
    detail = f"limit {format_size(limit)}: InfiniBand and NCCL register host memory against it"
    return Finding("memlock", "warn", detail, "ulimit -l unlimited, or in a container --ulimit memlock=-1")


def _check_gpus(around: Around) -> Finding:
    driver = has_driver(around.tree)
    try:
        gpus, warnings = find_gpus(around.tree, around.nvml if driver else None)
    except TopologyError as error:
        return Finding("GPUs", "warn", str(error))
    if not gpus:
        status: Status = "warn" if warnings else "ok"
        return Finding("GPUs", status, "; ".join(["none: ranks run on the CPUs", *warnings]))
    names = [gpu.name or f"{gpu.vendor or 'unnamed'} GPU" for gpu in gpus]
    text = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    if all(gpu.memory_bytes for gpu in gpus):
        return Finding("GPUs", "warn" if warnings else "ok", "; ".join([text, *warnings]))
    remedy = f"load the driver of {', '.join(sorted({gpu.vendor or 'the GPU' for gpu in gpus}))}"
    if driver:
        remedy = "nvidia-smi says why" if around.nvml else "pip install nvidia-ml-py"
    return Finding("GPUs", "warn", "; ".join([f"{text}, memory size unknown", *warnings]), remedy)


def _check_neighbours(around: Around) -> Finding:
    """Who has CPUs and GPUs already; a new job takes others first."""
    if not around.board.is_there:
        detail = "other jobs cannot be seen: no folder for them can be written"
        return Finding("other jobs", "warn", detail, "--jobs-dir DIR, one that all users can write")
    jobs = around.board.read()
    uses = read_gpu_uses(around.nvml) if around.nvml and has_driver(around.tree) else ()
    claimed = frozenset[str]().union(*(job.gpus for job in jobs))
    told = [describe_job(job) for job in jobs]
    told += [
        f"GPU {use.pci_bus_id} has {format_size(use.used_bytes)} in use"
        for use in uses
        if use.pci_bus_id not in claimed
    ]
    return Finding("other jobs", "warn" if told else "ok", "; ".join(told) or "none runs here")


def _check_own_name(around: Around) -> Finding:
    address = around.resolve(around.name)
    if address is not None:
        return Finding("host name", "ok", f"{around.name} is {address}")
    detail = f"{around.name} leads to no address: Horovod's Gloo ends with a segmentation fault"
    return Finding("host name", "missing", detail, REMEDY)


def _check_tensorflow(around: Around) -> Finding:
    version, folder = read_tensorflow_version(around.version), around.folder("tensorflow")
    if version is None or folder is None:
        detail = f"not found in {sys.executable}; programs without it still run"
        return Finding("TensorFlow", "missing", detail, pip_install("tensorflow"))
    details = [version, _tensorflow_build(folder)]
    native = "set_lms_enabled" in _text(folder / "python" / "framework" / "config.py")
    if native:
        details.append("with IBM's Large Model Support")
    low, high = TENSORFLOW_RANGE
    if not native and not low <= _numbers(version)[:2] < high:
        tested = f"LMS is tested with {'.'.join(map(str, low))} up to, not with, {'.'.join(map(str, high))}"
        return Finding("TensorFlow", "warn", ", ".join([*details, tested]), pip_install("tensorflow"))
    return Finding("TensorFlow", "ok", ", ".join(details))


def _tensorflow_build(folder: Path) -> str:
    """Read what the wheel was built for, from its generated ``build_info.py``."""
    text = _text(folder / "python" / "platform" / "build_info.py")
    if cuda := re.search(r"'cuda_version', '([^']*)'", text):
        return f"built for CUDA {cuda[1]}"
    if re.search(r"'is_rocm_build', True", text):
        return "built for ROCm"
    return "CPU only" if "is_cuda_build" in text else "build unknown"


def _check_horovod(around: Around) -> Finding:
    remedy = "lmsrun build-horovod"
    version, folder = around.version("horovod"), around.folder("horovod")
    if version is None or folder is None:
        return Finding("Horovod", "warn", "not found; programs that use it do not run, others do", remedy)
    libraries = sorted((folder / "tensorflow").glob("mpi_lib*.so"))
    if not libraries:
        return Finding("Horovod", "missing", f"{version} was built without TensorFlow", remedy)
    content = _bytes(libraries[0])
    built_for, here = _metadata(folder).get("tensorflow"), read_tensorflow_version(around.version)
    parts = list(_horovod_parts(content))
    detail = (
        f"{version} with {', '.join(parts) or 'no controller'}, built for TensorFlow {built_for or 'unknown'}"
    )
    if built_for and here and _numbers(built_for)[:2] != _numbers(here)[:2]:
        return Finding("Horovod", "missing", f"{detail}, but {here} is installed: it will not load", remedy)
    for needed in sorted(set(re.findall(rb"libmpi\.so\.\d+|libnccl\.so\.\d+", content))):
        if not around.loads(needed.decode()):
            return Finding("Horovod", "missing", f"{detail}; {needed.decode()} cannot be loaded", remedy)
    if "Gloo" not in parts:
        return Finding("Horovod", "warn", f"{detail}: needs --launcher mpirun", remedy)
    return Finding("Horovod", "ok", detail)


def _horovod_parts(content: bytes) -> Iterator[str]:
    """Find what is compiled in by a name that only that part's code uses; importing it would take seconds."""
    for mark, part in (
        (b"HOROVOD_GLOO_RENDEZVOUS_ADDR", "Gloo"),
        (b"MPI_Allreduce", "MPI"),
        (b"ncclAllReduce", "NCCL"),
    ):
        if mark in content:
            yield part


def _metadata(folder: Path) -> dict[str, str]:
    try:
        table = json.loads(_text(folder / "metadata.json"))
    except ValueError:
        return {}
    return {key: str(value) for key, value in table.items()} if isinstance(table, dict) else {}


def _check_mpi(around: Around) -> Finding:
    path = around.which("mpirun")
    if path is None:
        return Finding(
            "MPI", "warn", "no mpirun: only needed for --launcher mpirun", "apt-get install openmpi-bin"
        )
    try:
        flavour = read_mpi_flavour(path, around.environ)
    except LmsrunError as error:
        return Finding("MPI", "warn", str(error))
    return Finding("MPI", "ok", f"{flavour.title}, {path}")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def _text(path: Path) -> str:
    return _bytes(path).decode("utf-8", "replace")


def _bytes(path: Path) -> bytes:
    try:
        with path.open("rb") as opened:
            return opened.read(MAX_LIBRARY_BYTES)
    except OSError:
        return b""


def _folder(module: str) -> Path | None:
    spec = importlib.util.find_spec(module)
    return Path(spec.origin).parent if spec and spec.origin else None


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True
