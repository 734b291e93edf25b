"""The options of a job that another launcher starts, or that runs on more than this machine."""

import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields

from launch.model.settings import PlanSettings, choice, option, real_number, switch, whole_number

CLUSTER = "Hosts and launchers"
LAUNCHERS = ("auto", "local", "mpirun", "srun", "flux", "jsrun", "ddlrun", "horovodrun")
SCRIPTS = ("slurm", "lsf", "pbs", "flux")
ROOT_CONSENT = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
"""Open MPI's own variables for ``--allow-run-as-root``; both have to be ``1``."""
_OWN_WAY = frozenset({"lms", "lms_config"})
"""Reach a rank as ``LMS_*`` variables, not under their own names."""


def parse_words(text: str) -> str:
    """Check that a text can be cut into words as a shell would, without running one."""
    try:
        shlex.split(text)
    except ValueError as error:
        raise ValueError(f"words as a shell would take them ({error})") from None
    return text


@dataclass(frozen=True)
class ClusterSettings(PlanSettings):
    """Where a job runs and what starts it there. Times are seconds."""

    launcher: str = choice(
        "auto",
        "launcher",
        "what starts the ranks; auto: by allocation, hosts and what is here",
        CLUSTER,
        LAUNCHERS,
    )
    hosts: str | None = option(
        None,
        "hosts",
        "hosts and their slots",
        CLUSTER,
        metavar="A:4,B:4",
        flags=("-H",),
        join=",".join,
    )
    hostfile: str | None = option(
        None,
        "hostfile",
        "file of hosts, in the syntax of Open MPI, MPICH or Horovod",
        CLUSTER,
        metavar="FILE",
    )
    mpirun: str = option("mpirun", "mpirun", "the mpirun to use", CLUSTER, metavar="PATH")
    mpi_args: str | None = option(
        None,
        "mpi-args",
        "further words for mpirun, srun, flux run, jsrun or horovodrun",
        CLUSTER,
        parse=parse_words,
        join=shlex.join,
        metavar="WORDS",
    )
    allow_run_as_root: bool = switch(
        False, "allow-run-as-root", "consent that Open MPI starts ranks as root", CLUSTER
    )
    host_probe: bool | None = switch(
        None, "host-probe", "ask every host what it is like before the job (on with several hosts)", CLUSTER
    )
    probe_timeout: float = option(
        20.0,
        "probe-timeout",
        "how long the hosts may take to answer, in seconds",
        CLUSTER,
        parse=real_number(1, 3600),
        metavar="S",
    )
    controller: str = choice(
        "gloo", "controller", "what horovodrun connects ranks with", CLUSTER, ("gloo", "mpi")
    )
    timeline: str | None = option(None, "timeline", "horovodrun's timeline file", CLUSTER, metavar="FILE")
    min_np: int | None = option(
        None, "min-np", "elastic: fewest ranks (horovodrun)", CLUSTER, parse=whole_number(1), metavar="N"
    )
    max_np: int | None = option(
        None, "max-np", "elastic: most ranks (horovodrun)", CLUSTER, parse=whole_number(1), metavar="N"
    )
    host_discovery_script: str | None = option(
        None, "host-discovery-script", "elastic: prints the hosts of the moment", CLUSTER, metavar="FILE"
    )
    rankfile_out: str | None = option(
        None,
        "rankfile-out",
        "write the plan as a rankfile (mpirun) or an ERF (jsrun)",
        CLUSTER,
        metavar="FILE",
        in_file=False,
    )
    print_script: str | None = option(
        None,
        "print-script",
        "print a complete batch script instead of running",
        CLUSTER,
        parse=lambda text: _script(text),
        metavar="|".join(SCRIPTS),
        in_file=False,
    )
    walltime: str | None = option(
        None,
        "walltime",
        "with --print-script: how long the job may take (01:00:00)",
        CLUSTER,
        parse=lambda text: _walltime(text),
        metavar="HH:MM:SS",
    )
    account: str | None = option(
        None,
        "account",
        "with --print-script: the account or project that pays",
        CLUSTER,
        parse=lambda text: _batch_name(text),
        metavar="NAME",
    )
    partition: str | None = option(
        None,
        "partition",
        "with --print-script: the partition or queue",
        CLUSTER,
        parse=lambda text: _batch_name(text),
        metavar="NAME",
    )


def _batch_name(text: str) -> str:
    """Check that a name can stand in a line of a batch script, which a shell reads as well."""
    if not re.fullmatch(r"[\w.,:+@/-]+", text, re.ASCII):
        raise ValueError("a name of letters, digits and . , : + @ / _ -")
    return text


def _walltime(text: str) -> str:
    if not re.fullmatch(r"[0-9]{1,4}:[0-5][0-9]:[0-5][0-9]", text):
        raise ValueError("hours, minutes and seconds such as 01:30:00")
    if not text.strip("0:"):
        raise ValueError("a time above zero, such as 01:30:00")
    return text


_READERS: Mapping[str, tuple[str, ...]] = {
    "stdin": ("local", "mpirun", "srun", "flux"),
    "mpirun": ("mpirun",),
    "mpi_args": ("mpirun", "srun", "flux", "jsrun", "ddlrun", "horovodrun"),
    "controller": ("horovodrun",),
    "timeline": ("horovodrun",),
    "rankfile_out": ("mpirun", "jsrun", "ddlrun"),
}
"""The launchers that can do something with an option, where not all of them can."""


def find_unread(given: Iterable[str], launcher: str) -> dict[str, tuple[str, ...]]:
    """Which of the fields that were given mean nothing to a launcher, and to which they do."""
    return {
        field: _READERS[field] for field in given if field in _READERS and launcher not in _READERS[field]
    }


def settings_env(settings: PlanSettings) -> dict[str, str]:
    """Build the ``LMSRUN_*`` variables of options that are no default, for ranks that plan for themselves.

    ``PlanSettings.from_env`` gives the same settings back, except for those that travel as ``LMS_*``.
    """
    env = {}
    for declared in fields(PlanSettings):
        value = getattr(settings, declared.name)
        if value != declared.default and value is not None and declared.name not in _OWN_WAY:
            env[declared.metadata["option"].env_name] = _to_text(value)
    return env


def has_allocation(environ: Mapping[str, str]) -> bool:
    """Whether a batch system's variables are there at all; cheap enough for every start."""
    return any(
        environ.get(name)
        for name in (
            *("FLUX_ENCLOSING_ID", "SLURM_JOB_NODELIST", "LSB_JOBID", "PBS_NODEFILE"),
            "KUBERNETES_SERVICE_HOST",
        )
    )


def _to_text(value: object) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)


def _script(text: str) -> str:
    if text not in SCRIPTS:
        raise ValueError(f"one of {', '.join(SCRIPTS)}")
    return text
