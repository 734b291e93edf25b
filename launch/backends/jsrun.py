"""jsrun: IBM's Job Step Manager on LSF with CSM, as on Summit and Sierra.

Every host is one resource set with all of its CPUs and GPUs, so that peers stay visible and each rank binds
itself. Where hosts differ in ranks, or where the binding is wanted in jsrun's own hands, an explicit
resource file says it. The grammar is IBM's "Explicit Resource File (ERF) format" of the Job Step Manager
documentation.
"""

from collections.abc import Iterable, Sequence

from launch.backends.backend import Backend, Needed, Order
from launch.cluster.job import ClusterJob, Command
from launch.model.errors import UsageError
from launch.model.idset import format_ids
from launch.model.plan import RankPlan

# Two ranks of a host overlap on purpose where the ERF gives each the whole host or they share a NUMA node's
# threads.
_PREAMBLE = (
    "cpu_index_using: physical\n"
    "overlapping_rs: allow\n"
    "skip_missing_cpu: warn\n"
    "skip_missing_gpu: allow\n"
    "skip_missing_mem: allow\n"
    "oversubscribe_cpu: allow\n"
    "oversubscribe_gpu: allow\n"
    "oversubscribe_mem: allow\n"
    "launch_distribution: packed\n"
)


def build_jsrun(
    job: ClusterJob,
    ranks: Sequence[RankPlan],
    files_dir: str,
    extra: tuple[str, ...] = (),
    jsrun: str = "jsrun",
) -> Command:
    """Build the ``jsrun`` command that starts a job inside an LSF allocation.

    Args:
        job: The job.
        ranks: The placed ranks: whether they have GPUs, and where they go when hosts differ in ranks.
        files_dir: Where the ERF is written then.
        extra: The user's own words for it.
        jsrun: Path of the executable, or its bare name.
    """
    where, files = _resource_sets(job, ranks, files_dir)
    argv = (
        jsrun,
        *where,
        *("--exit_on_error", "1"),
        *(("--stdio_mode", "prepended") if job.tag_output else ()),
        *("--smpiargs", "-gpu" if any(rank.gpu for rank in ranks) else "-disable_gpu_hooks"),
        *extra,
        *job.worker,
    )
    return Command(argv, job.env, job.withhold, files)


def render_erf(ranks: Iterable[RankPlan]) -> str:
    """Render an ERF that binds each rank to its planned hardware threads, by the kernel's numbers.

    Raises:
        UsageError: If a rank has no CPUs: an ERF must name some.
    """
    return _PREAMBLE + "".join(f"rank: {rank.rank}: {{ {_resources(rank)} }}\n" for rank in ranks)


def _resources(rank: RankPlan) -> str:
    if not rank.cpus:
        raise UsageError(
            f"rank {rank.rank} has no CPUs to name in an ERF; plan with --numa auto and a topology"
        )
    cpus = ",".join(f"{{{run}}}" for run in format_ids(rank.cpus).split(","))
    return f"hostname: {rank.host}; cpu: {cpus}; gpu: *; mem: *"


def _resource_sets(
    job: ClusterJob, ranks: Iterable[RankPlan], files_dir: str
) -> tuple[tuple[str, ...], dict[str, str]]:
    if job.even_ranks is None:
        path = f"{files_dir}/job.erf"
        return ("--erf_input", path), {path: render_erf(ranks)}
    return (
        *("--nrs", str(len(job.shares)), "--rs_per_host", "1", "--tasks_per_rs", str(job.even_ranks)),
        *("--cpu_per_rs", "ALL_CPUS", "--gpu_per_rs", "ALL_GPUS"),
        *("--bind", "none", "--launch_distribution", "packed"),
    ), {}


class Jsrun(Backend):
    """The launcher of LSF with CSM."""

    name = "jsrun"
    needs = Needed(
        "lsf", "an LSF allocation", "try bsub (--print-script lsf writes a script), or --launcher auto"
    )

    def build(self, order: Order) -> Command:
        """See ``Backend``."""
        return build_jsrun(order.job, order.ranks, order.files_dir, order.extra, order.program)

    build_probe = build

    def render_rankfile(self, ranks: Sequence[RankPlan]) -> str:
        """See ``Backend``."""
        return render_erf(ranks)


BACKEND = Jsrun()
