"""Which rank a process is, by the variables of whichever launcher started it: a table of them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from launch.model.errors import UsageError
from launch.model.idset import MAX_ID, IdSet, parse_ids, parse_mask

_MAX_DIGITS = 9
Affinity = Literal["own", "parent", "slurm"]


@dataclass(frozen=True)
class RankRow:
    """The variables of one launcher: names in order of preference, of which the first that is set counts."""

    launcher: str
    rank: tuple[str, ...]
    world_size: tuple[str, ...]
    local_rank: tuple[str, ...]
    local_world_size: tuple[str, ...]
    remedy: str
    """What to try when the local rank is missing."""
    hosts: tuple[str, ...] = ()
    """The number of hosts, where the launcher does not count the ranks of this one."""
    affinity: Affinity = "own"
    """Whose CPU mask the ranks of a host share. Open MPI and Hydra bind each rank by default (to a core or a
    NUMA node), so there the parent's mask tells what the job may use; Slurm tells each task all masks of its
    node (``read_slurm_cpus``)."""


ROWS = (
    RankRow(
        "horovod",
        ("HOROVOD_RANK",),
        ("HOROVOD_SIZE",),
        ("HOROVOD_LOCAL_RANK",),
        ("HOROVOD_LOCAL_SIZE",),
        "start it with lmsrun or horovodrun, which set it",
    ),
    RankRow(
        "Open MPI or Spectrum MPI",
        ("OMPI_COMM_WORLD_RANK",),
        ("OMPI_COMM_WORLD_SIZE",),
        ("OMPI_COMM_WORLD_LOCAL_RANK",),
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
        "start it with mpirun, which sets it",
        affinity="parent",
    ),
    RankRow(
        "jsrun",
        ("JSM_NAMESPACE_RANK",),
        ("JSM_NAMESPACE_SIZE",),
        ("JSM_NAMESPACE_LOCAL_RANK",),
        ("JSM_NAMESPACE_LOCAL_SIZE",),
        "start it with jsrun, which sets it",
    ),
    RankRow(
        "MPICH or Intel MPI",
        ("PMI_RANK",),
        ("PMI_SIZE",),
        ("MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
        ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
        "start it with mpiexec.hydra, which sets MPI_LOCALRANKID, or export LOCAL_RANK and LOCAL_WORLD_SIZE",
        affinity="parent",
    ),
    RankRow(
        "torchrun",
        ("RANK",),
        ("WORLD_SIZE",),
        ("LOCAL_RANK",),
        ("LOCAL_WORLD_SIZE",),
        "export RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE together, as torchrun does",
    ),
    RankRow(
        "Flux",
        ("FLUX_TASK_RANK",),
        ("FLUX_JOB_SIZE",),
        ("FLUX_TASK_LOCAL_ID",),
        (),
        "export LOCAL_WORLD_SIZE, for Flux does not count the ranks of a host",
        hosts=("FLUX_JOB_NNODES",),
    ),
    RankRow(
        "Slurm",
        ("SLURM_PROCID",),
        ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"),
        ("SLURM_LOCALID",),
        ("SLURM_STEP_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE"),
        "start it with srun, which sets it",
        affinity="slurm",
    ),
    RankRow(
        "PMIx",
        ("PMIX_RANK",),
        ("PMIX_SIZE", "WORLD_SIZE"),
        ("PMIX_LOCAL_RANK", "LOCAL_RANK"),
        ("PMIX_LOCAL_SIZE", "LOCAL_WORLD_SIZE"),
        "export LOCAL_RANK and LOCAL_WORLD_SIZE for each rank",
    ),
)


@dataclass(frozen=True)
class RankIdentity:
    """A rank as its launcher told it. ``local_world_size`` counts the ranks of this host."""

    launcher: str
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    affinity: Affinity


LAUNCHERS_MARKS = ("OMPI_COMM_WORLD_RANK", "PMIX_NAMESPACE", "PMI_RANK", "PMI_PORT", "PMI_FD")
"""What Open MPI and Hydra set for a rank, and have not in their own environment with the same values."""


def read_rank(environ: Mapping[str, str]) -> RankIdentity:
    """Find out which rank this process is.

    The first row with both its rank and its local rank set wins; a batch job's own variables (Slurm sets them
    for the script itself) are passed over when an MPI launcher's or torchrun's are there, because of the
    table's order. Without such a row, ``LOCAL_RANK`` and ``LOCAL_WORLD_SIZE`` may complete one.

    Raises:
        UsageError: If no launcher is recognised, a value is missing, or values contradict each other.
    """
    for row in _likely_rows(environ):
        return _checked(_identify(row, environ))
    looked = ", ".join(row.rank[0] for row in ROWS)
    raise UsageError(
        f"cannot tell which rank this is: none of {looked} is set; "
        "start it with lmsrun, mpirun, srun, flux run, jsrun or torchrun"
    )


def find_rank(environ: Mapping[str, str]) -> int | None:
    """Find the rank's number by the row that ``read_rank`` takes, or another that has one; for messages."""
    names = (_first(environ, row.rank) for row in _likely_rows(environ))
    texts = (environ[name].strip() for name in names if name is not None)
    return next((int(text) for text in texts if _is_number(text)), None)


def _likely_rows(environ: Mapping[str, str]) -> list[RankRow]:
    """Find the rows of which a rank is set; first those whose local rank is set too."""
    started = [row for row in ROWS if _first(environ, row.rank) is not None]
    return sorted(started, key=lambda row: _first(environ, row.local_rank) is None)


def _identify(row: RankRow, environ: Mapping[str, str]) -> RankIdentity:
    local_rank = _number(row, environ, (*row.local_rank, "LOCAL_RANK"), "local rank")
    rank = _number(row, environ, row.rank, "rank")
    world_size = _number(row, environ, row.world_size, "number of ranks")
    local_names = (*row.local_world_size, "LOCAL_WORLD_SIZE")
    if _first(environ, local_names) is None and world_size == 1:
        local_world_size = 1
    elif _first(environ, local_names) is None and _first(environ, row.hosts) is not None:
        hosts = _number(row, environ, row.hosts, "number of hosts")
        if not hosts or world_size % hosts:
            raise UsageError(
                f"{row.launcher} put {world_size} ranks on {hosts} hosts, unevenly; {row.remedy}"
            )
        local_world_size = (
            world_size // hosts
        )  # Where they are not even, a host with more has a rank that says so.
    else:
        local_world_size = _number(row, environ, local_names, "number of ranks on this host")
    return RankIdentity(row.launcher, rank, world_size, local_rank, local_world_size, row.affinity)


def _number(row: RankRow, environ: Mapping[str, str], names: tuple[str, ...], what: str) -> int:
    name = _first(environ, names)
    if name is None:
        found = f"{row.rank[0]}={environ[row.rank[0]]}" if row.rank[0] in environ else row.launcher
        missing = " or ".join(dict.fromkeys(names))
        raise UsageError(f"{row.launcher} set {found} but no {what} ({missing}); {row.remedy}")
    text = environ[name].strip()
    if name in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE") and not text.isdigit():
        return _slurm_tasks_here(name, text, environ)
    if not _is_number(text):
        raise UsageError(f"{name} is {text[:40]!r}; needed a whole number")
    return int(text)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS


def _slurm_tasks_here(name: str, text: str, environ: Mapping[str, str]) -> int:
    """Slurm's list of tasks a node, such as ``4(x2),3``, at this node's place in it."""
    from launch.cluster.slurm_lists import find_count

    place = environ.get("SLURM_NODEID", "0")
    if not _is_number(place):
        raise UsageError(f"SLURM_NODEID is {place[:40]!r}; needed a whole number")
    return find_count(text, int(place), name)


def _checked(identity: RankIdentity) -> RankIdentity:
    if not identity.rank < identity.world_size:
        raise UsageError(
            f"{identity.launcher} says rank {identity.rank} of {identity.world_size}; "
            "needed a rank below the size"
        )
    if not identity.local_rank < identity.local_world_size <= identity.world_size:
        raise UsageError(
            f"{identity.launcher} says local rank {identity.local_rank} of {identity.local_world_size} "
            f"on this host, {identity.world_size} in all; needed local rank < ranks of this host <= all"
        )
    return identity


def read_slurm_cpus(environ: Mapping[str, str]) -> IdSet | None:
    """Read the CPUs that Slurm has dealt to the tasks of this node, all together; None when it does not say.

    ``SLURM_CPU_BIND`` is such as ``quiet,mask_cpu:0x0F,0xF0`` or ``verbose,map_cpu:0,2*3``, one entry a task.
    """
    words, colon, listed = environ.get("SLURM_CPU_BIND", "").rpartition(":")
    kind = words.rpartition(",")[2]
    if not colon or kind not in ("mask_cpu", "map_cpu"):
        return None
    entries = [entry.partition("*")[0].strip() for entry in listed.split(",")]
    try:
        dealt = [parse_mask(entry) if kind == "mask_cpu" else _parse_cpu(entry) for entry in entries]
    except ValueError:
        return None
    return frozenset().union(*dealt)


def _parse_cpu(text: str) -> IdSet:
    if not text.startswith("0x"):
        return parse_ids(text)
    number = int(text, 16)
    if number > MAX_ID:
        raise ValueError(f"CPU {text[:10]} is above {MAX_ID}")
    return frozenset({number})


def _first(environ: Mapping[str, str], names: tuple[str, ...]) -> str | None:
    return next((name for name in names if environ.get(name, "") != ""), None)
