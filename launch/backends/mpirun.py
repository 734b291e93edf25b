"""mpirun: Open MPI 4 and 5, IBM Spectrum MPI, MPICH (Hydra) and Intel MPI, one class a dialect.

All of them get the same job: so many ranks on each host, no binding of their own (each rank binds itself,
and Open MPI would bind to single cores below three ranks), and variables forwarded by name, so that no value
stands in an argv.
"""

import importlib.util
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Protocol

from launch.backends.backend import Backend, Order
from launch.cluster.job import ClusterJob, Command, refuse_ipv6
from launch.installed.horovod_build import read_horovod_mpi, speaks_with
from launch.installed.mpi_flavour import MpiFamily, MpiFlavour, read_mpi_flavour
from launch.model.cluster_settings import ClusterSettings
from launch.model.errors import UsageError
from launch.model.idset import format_ids
from launch.model.plan import RankPlan


class Dialect(Protocol):
    """How one MPI's launcher wants to be told."""

    @property
    def planned(self) -> frozenset[str]:
        """The names of its options that say how many ranks there are, and where: lmsrun has planned them."""

    def build(self, mpirun: str, job: ClusterJob, files_dir: str, extra: tuple[str, ...]) -> Command:
        """Build the command that starts the job; files that it needs will be written below ``files_dir``."""


@dataclass(frozen=True)
class OpenMpi:
    """Open MPI's mpirun, version 4 (ORTE) by default."""

    tag: tuple[str, ...] = ("--tag-output",)
    multi_host: Mapping[str, str] = field(default_factory=dict)
    """Variables of its own for jobs over several hosts."""

    planned: ClassVar[frozenset[str]] = frozenset(
        {
            *("n", "np", "c", "N", "npernode", "npersocket", "H", "host", "hostfile", "machinefile"),
            *("default-hostfile", "add-host", "add-hostfile", "rankfile", "rf"),
        }
    )

    # ORTE and Spectrum MPI warn about a variable that is not set, so only those that are set are named.
    def build(self, mpirun: str, job: ClusterJob, files_dir: str, extra: tuple[str, ...]) -> Command:
        """See ``Dialect``."""
        where, files = self._hosts(job, files_dir)
        policy = "slot:OVERSUBSCRIBE" if job.oversubscribe else "slot"
        argv = (
            mpirun,
            *(("--allow-run-as-root",) if job.allow_root else ()),
            *("-np", str(job.world_size), *where),
            *("--bind-to", "none", "--map-by", policy),
            *(self.tag if job.tag_output else ()),
            *(() if job.stdin is None else ("--stdin", str(job.stdin))),
            *(word for name in job.names for word in ("-x", name)),
            *extra,
            *job.worker,
        )
        own = self.multi_host if len(job.shares) > 1 else {}
        return Command(argv, {**own, **job.env}, job.withhold, files)

    def _hosts(self, job: ClusterJob, files_dir: str) -> tuple[tuple[str, ...], dict[str, str]]:
        """``-H host:slots``, or a hostfile for IPv6 addresses, whose colons ``-H`` takes for slots."""
        if any(":" in share.host for share in job.shares):
            path = f"{files_dir}/hostfile"
            return ("--hostfile", path), {path: render_hostfile(job)}
        return ("-H", ",".join(f"{share.host}:{share.ranks}" for share in job.shares)), {}


@dataclass(frozen=True)
class Hydra:
    """MPICH's and MVAPICH's launcher."""

    planned: ClassVar[frozenset[str]] = frozenset(
        {
            *("n", "np", "host", "hosts", "f", "hostfile", "machine", "machinefile"),
            *("ppn", "perhost", "grr", "rr"),
        }
    )

    def build(self, mpirun: str, job: ClusterJob, files_dir: str, extra: tuple[str, ...]) -> Command:
        """See ``Dialect``."""
        refuse_ipv6(job, "Hydra")
        if job.stdin:
            raise UsageError(f"--stdin {job.stdin}: under Hydra only rank 0 can read it; try --stdin 0")
        where, files = self._hosts(job, files_dir)
        argv = (
            mpirun,
            *("-n", str(job.world_size), *where),
            *self._binding,
            *(("-prepend-rank",) if job.tag_output else ()),
            *(("-genvlist", ",".join(job.names)) if job.names else ()),
            *extra,
            *job.worker,
        )
        return Command(argv, {**job.env, **self._variables}, job.withhold, files)

    _binding: ClassVar[tuple[str, ...]] = ("-bind-to", "none")
    _variables: ClassVar[dict[str, str]] = {}

    def _hosts(self, job: ClusterJob, files_dir: str) -> tuple[tuple[str, ...], dict[str, str]]:
        del files_dir
        return ("-hosts", ",".join(f"{share.host}:{share.ranks}" for share in job.shares)), {}


@dataclass(frozen=True)
class IntelMpi(Hydra):
    """Intel MPI: Hydra with its own pinning, and a machine file where the hosts differ in ranks."""

    _binding: ClassVar[tuple[str, ...]] = ("-genv", "I_MPI_PIN", "0")

    def _hosts(self, job: ClusterJob, files_dir: str) -> tuple[tuple[str, ...], dict[str, str]]:
        if job.even_ranks is not None:
            names = ",".join(share.host for share in job.shares)
            return ("-hosts", names, "-ppn", str(job.even_ranks)), {}
        path = f"{files_dir}/machinefile"
        return ("-machine", path), {path: "".join(f"{share.host}:{share.ranks}\n" for share in job.shares)}


# ORTE asks a silent daemon after 300 s whether it is there: a pulled cable would hang a job for so long.
_ORTE_KEEPALIVE = {
    "OMPI_MCA_oob_tcp_keepalive_time": "4",
    "OMPI_MCA_oob_tcp_keepalive_intvl": "2",
    "OMPI_MCA_oob_tcp_keepalive_probes": "3",
}
_ORTE = OpenMpi(multi_host=_ORTE_KEEPALIVE)
_DIALECTS: dict[MpiFamily, Dialect] = {
    "openmpi": _ORTE,
    "spectrum": _ORTE,
    "mpich": Hydra(),
    "intel": IntelMpi(),
}
_PRRTE = OpenMpi(tag=("--output", "tag"))


def dialect_of(flavour: MpiFlavour) -> Dialect:
    """Find the dialect that a flavour speaks."""
    return (
        _PRRTE if flavour.family == "openmpi" and flavour.version[:1] >= (5,) else _DIALECTS[flavour.family]
    )


def build_mpirun(
    mpirun: str, flavour: MpiFlavour, job: ClusterJob, files_dir: str, extra: tuple[str, ...] = ()
) -> Command:
    """Build the ``mpirun`` command that starts a job.

    Args:
        mpirun: Path of the executable, or its bare name.
        flavour: What it is.
        job: The job.
        files_dir: Where files that the command needs shall be written.
        extra: The user's own words for it.

    Raises:
        UsageError: If it cannot reach a host by IPv6 address, or the user's words contradict the plan.
    """
    dialect = dialect_of(flavour)
    for word in extra:
        if word.startswith("-") and _name_of(word) in dialect.planned:
            raise UsageError(
                f"--mpi-args has {word}, but how many ranks there are, and where, is planned before mpirun "
                "starts; give lmsrun's own -np, -H or --hostfile"
            )
    return dialect.build(mpirun, job, files_dir, extra)


def _name_of(word: str) -> str:
    return word.lstrip("-").partition("=")[0]


def refuse_root(flavour: MpiFlavour, job: ClusterJob, user_id: int) -> None:
    """Open MPI and Spectrum MPI ask root for consent: ask for it before they are started.

    Raises:
        UsageError: If this is root without ``--allow-run-as-root``.
    """
    if user_id == 0 and not job.allow_root and flavour.family in ("openmpi", "spectrum"):
        raise UsageError(
            f"{flavour.title} does not run as root without consent; try another user, or --allow-run-as-root"
        )


def render_hostfile(job: ClusterJob) -> str:
    """Open MPI's hostfile of a job."""
    return "".join(f"{share.host} slots={share.ranks}\n" for share in job.shares)


def render_rankfile(ranks: Iterable[RankPlan]) -> str:
    """Render Open MPI's rank file, by the kernel's numbers (``--mca rmaps_rank_file_physical 1``).

    Raises:
        UsageError: If a rank has no CPUs: a rank file must name some.
    """
    return "".join(f"rank {rank.rank}={rank.host} slot={_slots(rank)}\n" for rank in ranks)


def _slots(rank: RankPlan) -> str:
    if not rank.cpus:
        raise UsageError(f"rank {rank.rank} has no CPUs to name in a rank file; plan with --numa auto")
    return format_ids(rank.cpus)


class Mpirun(Backend):
    """The mpirun of whichever MPI it turns out to be."""

    name = "mpirun"
    takes_ssh = True

    def executables(self, settings: ClusterSettings) -> tuple[str, ...]:
        """Take its name from the options."""
        return (settings.mpirun,)

    def build(self, order: Order) -> Command:
        """See ``Backend``; over our own rendezvous where Horovod is linked with another MPI."""
        # A plan for elsewhere is shown in the dialect of Open MPI 4, the most common.
        flavour = (
            read_mpi_flavour(order.program, order.environ) if order.is_here else MpiFlavour("openmpi", (4,))
        )
        if not order.dry:
            refuse_root(flavour, order.job, os.geteuid())
        command = build_mpirun(order.program, flavour, order.job, order.files_dir, order.extra)
        if order.settings.framework == "tensorflow" or speaks_with(read_horovod_mpi(), flavour.family):
            return command
        if not order.only_here:
            raise UsageError(
                f"Horovod here is linked with another MPI than {flavour.title}; try the mpirun of that one "
                "(--mpirun PATH), or --launcher horovodrun"
            )
        return replace(command, gloo=True)

    def connects_probe(self) -> bool:
        """Look whether Python here can speak MPI."""
        return importlib.util.find_spec("mpi4py") is not None

    def build_probe(self, order: Order) -> Command | None:
        """See ``Backend``; what is only to be shown to root needs no consent, but mpirun is not started."""
        if order.dry and os.geteuid() == 0 and not order.job.allow_root:
            return None
        flavour = read_mpi_flavour(order.program, order.environ)
        refuse_root(flavour, order.job, os.geteuid())
        return build_mpirun(order.program, flavour, order.job, order.files_dir, order.extra)

    def render_rankfile(self, ranks: Sequence[RankPlan]) -> str:
        """See ``Backend``."""
        return render_rankfile(ranks)


BACKEND = Mpirun()
