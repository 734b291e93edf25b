"""What a batch system gave this job: hosts, slots and GPUs from Slurm, LSF, PBS, Flux or Kubernetes."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from launch.cluster.hosts import MAX_SLOTS, Host, parse_hostfile, parse_nodefile, refuse_twice
from launch.cluster.slurm_lists import expand_counts, parse_counts, parse_hostlist
from launch.model.errors import UsageError
from launch.system.run_query import read_answer

BatchSystem = Literal["slurm", "lsf", "pbs", "mpijob", "flux"]

MPIJOB_HOSTFILE = "/etc/mpi/hostfile"
_MAX_FILE_BYTES = 8 << 20
_HOST_NAME = re.compile(r"[A-Za-z0-9_.-]{1,255}", re.ASCII)
_GPU_COUNT = re.compile(r"(?:gpu:)?(?:[A-Za-z0-9_.-]+:)?(\d{1,4})(?:\(.*\))?")


@dataclass(frozen=True)
class Allocation:
    """The hosts of a batch job; slots are GPUs where it says how many, else tasks or cores."""

    system: BatchSystem
    job_id: str
    hosts: tuple[Host, ...]
    gpus_per_host: tuple[int | None, ...]
    """Beside ``hosts``; None is unknown."""
    csm: bool = False
    """LSF with IBM's Cluster System Management: ranks are started by jsrun, from a launch node without
    GPUs.
    """

    @property
    def title(self) -> str:
        """For messages: ``Slurm job 12``."""
        names = {"slurm": "Slurm job", "lsf": "LSF job", "pbs": "PBS job", "flux": "Flux job"}
        names["mpijob"] = "Kubernetes MPIJob"
        return f"{names[self.system]} {self.job_id}".rstrip()


def read_allocation(environ: Mapping[str, str], root: Path = Path("/")) -> Allocation | None:
    """Read the allocation that this process runs in; None outside of one.

    Args:
        environ: The environment.
        root: Where absolute paths of host files start.

    Raises:
        UsageError: If a batch system's variables or files contradict themselves or cannot be read.
    """
    for variable, parse in _SYSTEMS.items():
        if environ.get(variable):
            return parse(environ, root)
    return None


def parse_slurm(environ: Mapping[str, str], root: Path = Path("/")) -> Allocation:
    """From the variables that salloc and sbatch set. See ``read_allocation``."""
    del root
    names = parse_hostlist(environ["SLURM_JOB_NODELIST"])
    gpus = _slurm_gpus(environ, len(names))
    slots = gpus or _slurm_tasks(environ, len(names))
    hosts = refuse_twice(
        (Host(name, count) for name, count in zip(names, slots, strict=True)), "SLURM_JOB_NODELIST"
    )
    return Allocation("slurm", environ.get("SLURM_JOB_ID", ""), hosts, gpus or (None,) * len(hosts))


def parse_lsf(environ: Mapping[str, str], root: Path = Path("/")) -> Allocation:
    """From the variables that bsub sets. See ``read_allocation``.

    Slots may be ranks, as ``bsub -n`` asked for them, or cores. Under CSM the first host is the launch node:
    it has one slot and runs no rank, and the slots of the others count cores, which says nothing about ranks.
    """
    del root
    hosts = _lsf_hosts(environ)
    csm = bool(environ.get("CSM_ALLOCATION_ID"))
    if csm and len(hosts) > 1 and hosts[0].slots == 1:
        hosts = hosts[1:]
    hosts = tuple(Host(host.name, None if csm else host.slots, may_count_cores=not csm) for host in hosts)
    return Allocation("lsf", environ.get("LSB_JOBID", ""), hosts, (None,) * len(hosts), csm)


def parse_pbs(environ: Mapping[str, str], root: Path = Path("/")) -> Allocation:
    """From PBS Pro's or Torque's node file, and Torque's GPU file. See ``read_allocation``."""
    path = environ["PBS_NODEFILE"]
    hosts = parse_nodefile(_read(root, path), f"PBS_NODEFILE ({path})")
    gpus: dict[str, int] = {}
    for line in _read(root, environ["PBS_GPUFILE"]).split() if environ.get("PBS_GPUFILE") else ():
        name = re.sub(r"-gpu\d+$", "", line)
        gpus[name] = gpus.get(name, 0) + 1
    counts = tuple(gpus.get(host.name) for host in hosts)
    hosts = tuple(
        Host(host.name, count or host.slots, may_count_cores=not count)
        for host, count in zip(hosts, counts, strict=True)
    )
    return Allocation("pbs", environ.get("PBS_JOBID", ""), hosts, counts)


def parse_flux(environ: Mapping[str, str], root: Path = Path("/")) -> Allocation:
    """From the instance that flux alloc and flux batch start, which alone knows its hosts.

    Slots are left to the machines: of a node Flux counts cores and GPUs, and each rank sees those of its job.
    See ``read_allocation``.
    """
    del root
    words = ("flux", "hostlist", "--expand", "avail")
    said = read_answer(words, environ, "FLUX_ENCLOSING_ID is set: is flux in PATH?")
    names = said.split()
    if not names or not all(_HOST_NAME.fullmatch(name) for name in names):
        raise UsageError(
            f"`{' '.join(words)}` says {said.strip()[:200]!r}; needed the names of hosts. Try unsetting "
            "FLUX_ENCLOSING_ID outside of a Flux job, or give --hosts"
        )
    # Several brokers of one host are one host.
    hosts = tuple(Host(name) for name in dict.fromkeys(names))
    return Allocation("flux", environ["FLUX_ENCLOSING_ID"], hosts, (None,) * len(hosts))


def parse_mpijob(environ: Mapping[str, str], root: Path = Path("/")) -> Allocation:
    """From the hostfile that Kubernetes' MPI operator mounts in the launcher. See ``read_allocation``."""
    named = (environ.get(name) for name in _MPIJOB_VARIABLES)
    path = next((path for path in named if path), MPIJOB_HOSTFILE)
    hosts = parse_hostfile(_read(root, path), path)
    return Allocation("mpijob", "", hosts, (None,) * len(hosts))


_MPIJOB_VARIABLES = (
    "OMPI_MCA_orte_default_hostfile",
    "PRTE_MCA_prte_default_hostfile",
    "I_MPI_HYDRA_HOST_FILE",
    "HYDRA_HOST_FILE",
)


def _parse_kubernetes(environ: Mapping[str, str], root: Path) -> Allocation | None:
    """Any pod has the variable; only an MPIJob's launcher has the file."""
    return parse_mpijob(environ, root) if (root / MPIJOB_HOSTFILE.lstrip("/")).is_file() else None


_SYSTEMS: Mapping[str, Callable[[Mapping[str, str], Path], Allocation | None]] = {
    "FLUX_ENCLOSING_ID": parse_flux,  # First: an instance may have been started in another system's job.
    "SLURM_JOB_NODELIST": parse_slurm,
    "LSB_JOBID": parse_lsf,
    "PBS_NODEFILE": parse_pbs,
    "KUBERNETES_SERVICE_HOST": _parse_kubernetes,
}


def _slurm_gpus(environ: Mapping[str, str], hosts: int) -> tuple[int | None, ...]:
    """Count the GPUs of each host; none where Slurm says nothing of them.

    ``--gpus`` asks for a number in all, which Slurm deals as it has room: what it says of the node that this
    process is on then holds for the others only where it adds up. Where it does not, and the hosts are more
    than two, they tell themselves.
    """
    each = _gpu_count(environ, "SLURM_GPUS_PER_NODE")
    here = each or _gpu_count(environ, "SLURM_GPUS_ON_NODE")
    total = None if each else _gpu_count(environ, "SLURM_GPUS")
    if not here:
        return ()
    if not total or here * hosts == total:
        return (here,) * hosts
    if hosts != 2 or here > total:
        return (None,) * hosts
    dealt = (here, total - here)
    return dealt[::-1] if _slurm_number(environ, "SLURM_NODEID") == 1 else dealt


def _gpu_count(environ: Mapping[str, str], variable: str) -> int | None:
    text = environ.get(variable, "")
    counts = [_GPU_COUNT.fullmatch(part) for part in text.split(",")] if text else []
    if not all(counts):
        raise UsageError(f"{variable} is {text!r}; needed a number of GPUs such as '4' or 'v100:4'")
    return sum(int(count[1]) for count in counts if count) or None


def _slurm_tasks(environ: Mapping[str, str], hosts: int) -> tuple[int | None, ...]:
    """Tasks where the user asked for tasks; without -n Slurm counts CPUs, which says nothing of ranks."""
    asked = [
        _slurm_number(environ, name) for name in ("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NTASKS_PER_NODE")
    ]
    text = environ.get("SLURM_TASKS_PER_NODE")
    if text and any(asked):
        return parse_counts(text, hosts, "SLURM_TASKS_PER_NODE")
    if text:  # Counts nothing for us; but a damaged environment is told of.
        expand_counts(text, "SLURM_TASKS_PER_NODE", 1)
    return (None,) * hosts


def _slurm_number(environ: Mapping[str, str], variable: str) -> int | None:
    text = environ.get(variable, "").strip()
    if text and not (text.isascii() and text.isdigit() and len(text) < 10):
        raise UsageError(f"{variable} is {text[:200]!r}; needed a whole number")
    return int(text) if text else None


def _lsf_hosts(environ: Mapping[str, str]) -> tuple[Host, ...]:
    words = environ.get("LSB_MCPU_HOSTS", "").split()
    if words:
        pairs = zip(words[::2], words[1::2], strict=False)
        if len(words) % 2 or not all(count.isascii() and count.isdigit() for count in words[1::2]):
            raise UsageError(
                f"LSB_MCPU_HOSTS is {' '.join(words)[:200]!r}; needed 'HOST SLOTS HOST SLOTS ...'"
            )
        text = "\n".join(
            f"{name} slots={int(count) if len(count) < 6 else MAX_SLOTS + 1}" for name, count in pairs
        )
        return parse_hostfile(text, "LSB_MCPU_HOSTS")
    names = environ.get("LSB_HOSTS", "").split()
    if names:
        return parse_nodefile("\n".join(names), "LSB_HOSTS")
    raise UsageError(
        "LSB_JOBID is set without LSB_MCPU_HOSTS or LSB_HOSTS; try unsetting it, or give --hosts"
    )


def _read(root: Path, path: str) -> str:
    place = root / path.lstrip("/") if path.startswith("/") else Path(path)
    try:
        with place.open(encoding="utf-8-sig") as file:
            text = file.read(_MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise UsageError(f"cannot read the host file {path!r}: {reason}") from error
    if len(text) > _MAX_FILE_BYTES:
        raise UsageError(f"the host file {path!r} is larger than {_MAX_FILE_BYTES >> 20} MiB")
    return text
