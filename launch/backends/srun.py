"""srun: one job step over the hosts of a Slurm allocation."""

import re
from collections.abc import Mapping

from launch.backends.backend import Backend, Needed, Order
from launch.cluster.job import ClusterJob, Command
from launch.system.run_query import read_answer

_WANTED = ("pmix", "pmix_v5", "pmix_v4", "pmix_v3", "pmix_v2", "pmi2", "none")

# Slurm gives its own variables to a task by itself; --export names all others, and without these a program
# cannot find its home.
_SITE = ("HOME", "USER", "LOGNAME", "SHELL", "TMPDIR", "TERM")


def build_srun(
    job: ClusterJob,
    files_dir: str,
    mpi: str | None = None,
    extra: tuple[str, ...] = (),
    srun: str = "srun",
) -> Command:
    """Build the ``srun`` command that starts a job inside an allocation.

    GPUs stay visible to every rank (``--gpu-bind=none``): a rank picks its own, and peers stay reachable for
    CUDA IPC. ``--overcommit`` lets a rank start where the allocation counted fewer tasks than GPUs.

    Args:
        job: The job.
        files_dir: Where a host file is written when hosts differ in ranks.
        mpi: A plugin for ``--mpi``; None leaves the site's default.
        extra: The user's own words for it.
        srun: Path of the executable, or its bare name.
    """
    argv = (
        srun,
        f"--nodes={len(job.shares)}",
        f"--ntasks={job.world_size}",
        *_placement(job),
        *("--cpu-bind=none", "--mem-bind=none", "--gpu-bind=none"),
        *("--overcommit", "--kill-on-bad-exit=1"),
        *(() if job.whole_lines else ("--unbuffered",)),
        *((f"--mpi={mpi}",) if mpi else ()),
        *(("--label",) if job.tag_output else ()),
        *(() if job.stdin is None else (f"--input={job.stdin}",)),
        f"--export={','.join((*_SITE, *job.names))}",
        *extra,
        *job.worker,
    )
    # srun would read the batch script's own request over ours.
    unset = (*job.withhold, "SLURM_NTASKS_PER_NODE", "SLURM_DISTRIBUTION")
    if job.even_ranks is not None:
        return Command(argv, job.env, unset)
    path = f"{files_dir}/hostfile"
    return Command(argv, {**job.env, "SLURM_HOSTFILE": path}, unset, {path: render_arbitrary(job)})


def render_arbitrary(job: ClusterJob) -> str:
    """Render the host file of ``--distribution=arbitrary``: one host name per rank, in rank order."""
    return "".join(f"{share.host}\n" * share.ranks for share in job.shares)


def choose_mpi(text: str) -> str | None:
    """Choose the best plugin that ``srun --mpi=list`` prints; None when it names none that is known."""
    names = set(re.findall(r"[a-z][a-z0-9_]*", text.lower()))
    return next((name for name in _WANTED if name in names), None)


def read_mpi_plugins(srun: str, environ: Mapping[str, str]) -> str:
    """Read what ``srun --mpi=list`` prints.

    Raises:
        JobError: If srun cannot be run or does not answer.
    """
    return read_answer([srun, "--mpi=list"], environ, "is this a Slurm host?")


def _placement(job: ClusterJob) -> tuple[str, ...]:
    if job.even_ranks is None:
        return ("--distribution=arbitrary",)
    hosts = ",".join(share.host for share in job.shares)
    return (f"--ntasks-per-node={job.even_ranks}", "--distribution=block", f"--nodelist={hosts}")


class Srun(Backend):
    """Slurm's own launcher."""

    name = "srun"
    needs = Needed(
        "slurm",
        "a Slurm allocation",
        "try salloc or sbatch (--print-script slurm writes a script), or --launcher auto",
    )

    def build(self, order: Order) -> Command:
        """See ``Backend``."""
        mpi = choose_mpi(read_mpi_plugins(order.program, order.environ)) if order.is_here else None
        return build_srun(order.job, order.files_dir, mpi, order.extra, order.program)

    def build_probe(self, order: Order) -> Command:
        """See ``Backend``."""
        return build_srun(order.job, order.files_dir, "none", order.extra, order.program)


BACKEND = Srun()
