"""What already runs on a host, as far as a new job has to know it: whose CPUs and GPUs it would share."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

from launch.model.errors import UsageError
from launch.model.idset import IdSet, format_ids, parse_ids
from launch.model.text import count_of
from launch.model.topology import Gpu, Machine


@dataclass(frozen=True)
class RunningJob:
    """One running job of lmsrun: what its ranks on this host are bound to."""

    name: str
    """For people: its program, its user where that is another, its process."""
    cpus: IdSet = frozenset()
    gpus: frozenset[str] = frozenset()
    """Each by ``gpu_key``."""
    temporary: str = ""
    """The folder that its private one is in; told of this user's own jobs alone."""


@dataclass(frozen=True)
class GpuUse:
    """One GPU that is not idle, by NVML."""

    pci_bus_id: str
    used_bytes: int
    """Memory in use, the driver's own share included."""
    processes: int


@dataclass(frozen=True)
class Busy:
    """All that runs on a host. Nothing of it is forbidden to a new job; it takes what is free first."""

    jobs: tuple[RunningJob, ...] = ()
    uses: tuple[GpuUse, ...] = ()

    def on(self, machine: Machine) -> "Busy":
        """Keep the CPUs and GPUs that a machine has: anybody may write notes of others."""
        cpus = frozenset[int]().union(*(core.cpus for core in machine.cores))
        gpus = frozenset(map(gpu_key, machine.gpus))
        there = (replace(job, cpus=job.cpus & cpus, gpus=job.gpus & gpus) for job in self.jobs)
        return replace(self, jobs=tuple(job for job in there if job.cpus or job.gpus))

    @property
    def cpus(self) -> IdSet:
        """The CPUs of all running jobs."""
        return frozenset().union(*(job.cpus for job in self.jobs))

    def has_gpu(self, gpu: Gpu) -> bool:
        """Tell whether somebody uses a GPU."""
        return any(gpu_key(gpu) in job.gpus for job in self.jobs) or self._use(gpu) is not None

    def tell_gpu(self, gpu: Gpu) -> str:
        """Name who uses a GPU; empty when nobody does."""
        jobs = [job.name for job in self.jobs if gpu_key(gpu) in job.gpus]
        use = self._use(gpu)
        if jobs or use is None:
            return " and ".join(jobs)
        memory = f"{use.used_bytes / (1 << 30):.1f} GiB of its memory in use"
        return f"{count_of(use.processes, 'other program')}, {memory}" if use.processes else memory

    def tell_cpus(self, cpus: IdSet) -> list[tuple[str, str]]:
        """Name the jobs that have some of these CPUs, each with which."""
        return [(job.name, format_ids(job.cpus & cpus)) for job in self.jobs if job.cpus & cpus]

    def _use(self, gpu: Gpu) -> GpuUse | None:
        # A MIG device shares its address with others: what NVML says of the whole GPU is not said of it.
        if (gpu.uuid or "").startswith("MIG-") or gpu.partition is not None:
            return None
        return next((use for use in self.uses if use.pci_bus_id == gpu.pci_bus_id), None)


def gpu_key(gpu: Gpu) -> str:
    """Name a GPU as every job of a host knows it: by its address, or by what tells parts of a GPU apart."""
    if gpu.partition is not None:
        return gpu.address
    is_mig = (gpu.uuid or "").startswith("MIG-")
    return (gpu.uuid if is_mig else gpu.pci_bus_id) or gpu.uuid or str(gpu.index)


BUSY = "LMSRUN_BUSY"
_MOST_CHARACTERS = 32_768
"""The variable by which ranks of another launcher on this host plan around the same jobs as lmsrun did."""


def busy_to_text(busy: Busy) -> str:
    """Write what runs for the ranks of a job; of very much the CPUs and GPUs alone.

    Linux takes no variable of more than 128 KiB (``MAX_ARG_STRLEN``).
    """
    text = _write(busy)
    if len(text) > _MOST_CHARACTERS:
        gpus = frozenset[str]().union(*(job.gpus for job in busy.jobs))
        text = _write(replace(busy, jobs=(RunningJob(f"{len(busy.jobs)} jobs", busy.cpus, gpus),)))
    return text


def _write(busy: Busy) -> str:
    jobs = [[job.name, format_ids(job.cpus), sorted(job.gpus)] for job in busy.jobs]
    uses = [[use.pci_bus_id, use.used_bytes, use.processes] for use in busy.uses]
    return json.dumps({"jobs": jobs, "uses": uses})


def parse_busy(text: str) -> Busy:
    """Read what ``busy_to_text`` wrote.

    Raises:
        UsageError: If it is not that.
    """
    try:
        table = json.loads(text)
        jobs = [
            RunningJob(str(name), parse_ids(str(cpus)), frozenset(map(str, gpus)))
            for name, cpus, gpus in table["jobs"]
        ]
        uses = [GpuUse(str(bus_id), int(used), int(count)) for bus_id, used, count in table["uses"]]
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise UsageError(f"{BUSY} is damaged ({error}); leave it to lmsrun to set it") from error
    return Busy(tuple(jobs), tuple(uses))


def describe_job(job: RunningJob) -> str:
    """Say what a job has, for people."""
    parts = [f"CPUs {format_ids(job.cpus)}"] if job.cpus else []
    parts += [f"{'GPU' if len(job.gpus) == 1 else 'GPUs'} {_some(sorted(job.gpus))}"] if job.gpus else []
    return f"{job.name} has {' and '.join(parts) or 'neither CPUs nor GPUs of its own'}"


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
