"""What already runs on this host: its load, other jobs of lmsrun, and GPUs that somebody computes on."""

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from launch.discover import has_driver
from launch.discover.gpus import parse_pci_address
from launch.discover.nvml import import_nvml
from launch.discover.tree import Tree
from launch.model.busy import Busy, GpuUse
from launch.system.job_board import JOB_NOTE, JobBoard

_JOB_ID, _RANK = "LMSRUN_JOB_ID", "RANK"


@dataclass(frozen=True)
class Occupancy:
    """What a new job would share the host with."""

    load: float | None = None
    """Processes that want a CPU, now and in the mean of the last minute (the lesser of both, for a job that
    has just ended still shows in the mean); None is unknown."""
    jobs: int = 0
    """Other jobs of lmsrun, as far as this user may see them."""
    ranks: int = 0
    """Their ranks on this host."""
    gpus: tuple[GpuUse, ...] = ()


def read_occupancy(tree: Tree, environ: Mapping[str, str], nvml: Any) -> Occupancy:
    """Look around on this host.

    Args:
        tree: Where ``proc/`` is.
        environ: This process's own, whose job is not another one.
        nvml: The module ``pynvml`` or its stand-in; None: the GPUs cannot be asked.
    """
    ranks = _read_other_ranks(tree, environ.get(_JOB_ID))
    return Occupancy(
        load=_read_load(tree),
        jobs=len({job for job, _ in ranks}),
        ranks=len(ranks),
        gpus=read_gpu_uses(nvml) if nvml is not None else (),
    )


def ask_gpu_uses(tree: Tree) -> tuple[GpuUse, ...]:
    """Ask for the GPUs that somebody computes on, which takes seconds where the driver starts them first.

    Args:
        tree: Where ``proc/`` and ``dev/`` are.
    """
    nvml = import_nvml() if has_driver(tree) else None
    return read_gpu_uses(nvml) if nvml is not None else ()


def read_busy(board: JobBoard, gpus: tuple[GpuUse, ...], environ: Mapping[str, str]) -> Busy:
    """Read what runs on this host and is bound to CPUs or GPUs.

    Args:
        board: Where jobs of lmsrun are written down.
        gpus: Those that somebody computes on.
        environ: This process's own, whose job is not another one.
    """
    return Busy(board.read(environ.get(JOB_NOTE, "")), gpus)


def _read_load(tree: Tree) -> float | None:
    try:
        mean, _, _, now, *_ = (tree.read("proc/loadavg") or "").split()
        return min(float(mean), int(now.partition("/")[0]) - 1.0)  # This process is one of them.
    except ValueError:
        return None


def _read_other_ranks(tree: Tree, own_job: str | None) -> set[tuple[str, str]]:
    """(job, rank) of every process that a rank's environment shows; a rank's children count with it."""
    found = set()
    for name in tree.names("proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        variables = dict(
            entry.partition("=")[::2] for entry in (tree.read(f"proc/{name}/environ") or "").split("\0")
        )
        job, rank = variables.get(_JOB_ID), variables.get(_RANK)
        if job and rank and job != own_job:
            found.add((job, rank))
    return found


def read_gpu_uses(nvml: Any) -> tuple[GpuUse, ...]:
    """Ask NVML, the module ``pynvml`` or its stand-in, for the GPUs that are not idle."""
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return ()
    try:
        uses = [_read_use(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]
    except nvml.NVMLError:
        return ()
    finally:
        with suppress(nvml.NVMLError):
            nvml.nvmlShutdown()
    return tuple(use for use in uses if use is not None)


def _read_use(nvml: Any, index: int) -> GpuUse | None:
    """None for an idle GPU, or one that NVML knows nothing of."""
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        bus_id = nvml.nvmlDeviceGetPciInfo(handle).busId
        processes = len(nvml.nvmlDeviceGetComputeRunningProcesses(handle))
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    except (nvml.NVMLError, AttributeError):
        return None
    address = parse_pci_address(bus_id.decode("ascii", "replace") if isinstance(bus_id, bytes) else bus_id)
    # Processes of other containers are not listed, but their memory counts.
    if address is None or not (processes or memory.used > memory.total // 10):
        return None
    return GpuUse(address, int(memory.used), processes)
