"""Flux's launcher ``flux run``: one job of the enclosing instance, with whole nodes for its ranks.

Which CPUs and GPUs of a node are the job's, Flux says by the mask and ``CUDA_VISIBLE_DEVICES`` that all tasks
of a node share (its shell options ``cpu-affinity`` and ``gpu-affinity`` are ``on`` by default); each rank
then binds itself within. The options are those of flux-run(1) and flux-shell-options(7) of flux-core 0.88.
"""

from launch.backends.backend import Backend, Needed, Order
from launch.cluster.job import ClusterJob, Command
from launch.model.errors import UsageError

# Flux sets its own variables in each task; the environment is named one by one, and without these a program
# cannot find its home.
_SITE = ("HOME", "USER", "LOGNAME", "SHELL", "TMPDIR", "TERM")


def build_flux(job: ClusterJob, extra: tuple[str, ...] = (), flux: str = "flux") -> Command:
    """Build the ``flux run`` command that starts a job inside an instance.

    Args:
        job: The job.
        extra: The user's own words for it.
        flux: Path of the executable, or its bare name.

    Raises:
        UsageError: If hosts differ in ranks.
    """
    if job.even_ranks is None:
        counts = ", ".join(f"{share.host}:{share.ranks}" for share in job.shares)
        raise UsageError(
            f"flux run gives every host as many ranks, but found {counts}; give the hosts equal slots, "
            "or try --launcher mpirun"
        )
    argv = (
        *(flux, "run"),
        f"--nodes={len(job.shares)}",
        f"--tasks-per-node={job.even_ranks}",
        "--exclusive",
        f"--requires=hosts:{','.join(share.host for share in job.shares)}",
        # A rank that leaves early is no failure, as which Flux counts it after 30 s; one that fails is.
        *("--setopt=exit-timeout=none", "--setopt=exit-on-error"),
        *(() if job.whole_lines else ("--unbuffered",)),
        *(("--label-io",) if job.tag_output else ()),
        *(() if job.stdin is None else (f"--input={job.stdin}",)),
        "--env-remove=*",
        *(f"--env={name}" for name in (*_SITE, *job.names, "LOCAL_WORLD_SIZE")),
        *extra,
        *job.worker,
    )
    return Command(argv, {**job.env, "LOCAL_WORLD_SIZE": str(job.even_ranks)}, job.withhold)


class Flux(Backend):
    """The launcher of a Flux instance."""

    name = "flux"
    needs = Needed(
        "flux",
        "a Flux job",
        "try flux alloc or flux batch (--print-script flux writes a script), or --launcher auto",
    )

    def build(self, order: Order) -> Command:
        """See ``Backend``."""
        return build_flux(order.job, order.extra, order.program)

    build_probe = build


BACKEND = Flux()
