"""horovodrun: Horovod's own launcher, over Gloo or MPI, for ssh hosts and for elastic jobs."""

import json
import os
import re
import secrets
import shlex
import sys
from dataclasses import dataclass, replace
from typing import Literal

from launch.backends.backend import Backend, Order
from launch.cluster.hosts import is_name_of
from launch.cluster.job import ClusterJob, Command, is_private, refuse_ipv6
from launch.model.cluster_settings import ClusterSettings
from launch.model.rank_variables import CONTROL_KEY, ENVIRONMENT, IDENTITY, TRANSPORT


@dataclass(frozen=True)
class HorovodOptions:
    """What horovodrun is told beside the job."""

    controller: Literal["gloo", "mpi"] = "gloo"
    timeline: str | None = None
    min_ranks: int | None = None
    max_ranks: int | None = None
    discovery_script: str | None = None

    @property
    def elastic(self) -> bool:
        """Whether ranks may come and go."""
        return self.discovery_script is not None or self.min_ranks is not None or self.max_ranks is not None


def build_horovodrun(
    job: ClusterJob, options: HorovodOptions, horovodrun: str = "horovodrun", extra: tuple[str, ...] = ()
) -> Command:
    """Build the ``horovodrun`` command that starts a job; ``extra`` are the user's own words for it.

    It hands its whole environment to every host in the argv of ssh, which is why what must not leave this
    host is taken from it (``Command.unset``) instead of listed.

    Raises:
        UsageError: If a host is an IPv6 address, which horovodrun's host syntax cannot carry.
    """
    refuse_ipv6(job, "horovodrun")
    argv = (
        horovodrun,
        *("-np", str(job.world_size)),
        *_hosts(job, options),
        f"--{options.controller}",
        *(("--mpi-args", _MPI_ARGS[job.allow_root]) if options.controller == "mpi" else ()),
        *_given("--timeline-filename", options.timeline),
        *extra,
        *job.worker,
    )
    return Command(argv, job.env, job.withhold, elastic=options.elastic)


# horovodrun adds "-bind-to none -map-by slot" itself, and cuts this text at its spaces.
_MPI_ARGS = {
    False: "--mca orte_abort_on_non_zero_status 1",
    True: "--mca orte_abort_on_non_zero_status 1 --allow-run-as-root",
}


def _hosts(job: ClusterJob, options: HorovodOptions) -> tuple[str, ...]:
    elastic = (
        *_given("--min-np", options.min_ranks),
        *_given("--max-np", options.max_ranks),
    )
    if options.discovery_script is not None:
        # Horovod has a shell run this text.
        return (*elastic, "--host-discovery-script", shlex.quote(options.discovery_script))
    return (*elastic, "-H", ",".join(f"{share.host}:{share.ranks}" for share in job.shares))


def _given(flag: str, value: object) -> tuple[str, ...]:
    return () if value is None else (flag, str(value))


# What horovodrun itself needs: it starts every rank as "env NAME=VALUE ... PROGRAM", for all to read in the
# list of processes, whatever it was started with.
_OWN = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|LANG|LC_[A-Z]+|TZ|TMPDIR|TERM|LD_LIBRARY_PATH|PYTHON(?:PATH|HOME|UTF8)|"
    r"VIRTUAL_ENV|CONDA_PREFIX|SSH_AUTH_SOCK|HOROVOD_.*"
)


_TEMPORARY = "/tmp"  # noqa: S108 - for a new folder of a random name; a job's own TMPDIR may be of one host only


def _others(order: Order) -> tuple[str, ...]:
    return tuple(sorted(name for name in order.environ if is_private(name) or not _OWN.fullmatch(name)))


def _hide_here(command: Command, order: Order) -> Command:
    """Hand the ranks of this host their environment in a file that only its owner can read."""
    path = f"{order.files_dir}/environment"
    inherited = {name: value for name, value in order.environ.items() if name not in IDENTITY}
    argv, at = command.argv, len(command.argv) - len(order.job.worker) + order.job.worker.index("worker") + 1
    return replace(
        command,
        argv=(*argv[:at], ENVIRONMENT, path, *argv[at:]),
        env={},
        unset=tuple(name for name in _others(order) if name not in TRANSPORT),
        files={**command.files, path: json.dumps({**inherited, **command.env})},
    )


def _hide_elsewhere(command: Command, order: Order) -> Command:
    """Hand ranks of other hosts, too, what they are to get in a private file, which lmsrun brings there.

    With it they get the key of the channel: the job's id stands on ssh's command line.
    """
    here, key = os.uname().nodename, secrets.token_hex(16)
    path = f"{_TEMPORARY}/{os.path.basename(order.files_dir)}/environment"
    inherited = {name: order.environ[name] for name in order.job.names if name in order.environ}
    table = {**inherited, **command.env, CONTROL_KEY: key}
    argv, at = command.argv, len(command.argv) - len(order.job.worker) + order.job.worker.index("worker") + 1
    return replace(
        command,
        argv=(*argv[:at], ENVIRONMENT, path, *argv[at:]),
        env={},
        unset=_others(order),
        files={**command.files, path: json.dumps(table)},
        control_key=key,
        elsewhere=tuple(share.host for share in order.job.shares if not is_name_of(share.host, here)),
    )


def _show_elsewhere(command: Command, order: Order) -> Command:
    """Leave only what ranks are to get: to hosts that come and go leads no way but ssh's command line."""
    names = {*order.job.names, *command.env}
    unset = tuple(name for name in _others(order) if name not in names)
    own = ("LMS", "MASTER_")
    typed = {name for name in order.job.env if not name.startswith(own)}
    given = sorted(typed.union(filter(is_private, names)))
    shown = (
        f"horovodrun writes the values of {', '.join(given)} into ssh's command line, which every user of "
        "these hosts can read; try --launcher mpirun"
    )
    warnings = (*command.warnings, *((shown,) if given else ()))
    return replace(command, unset=unset, shows_environ=True, warnings=warnings)


ELASTIC_RENDEZVOUS = (
    "an elastic job's ranks meet at Horovod's own server, which listens on every interface and unpickles "
    "what anybody sends who reaches it (CVE-2024-10190): only where you trust all who can reach this host"
)


class Horovodrun(Backend):
    """Horovod's launcher; it starts nothing but programs that call ``hvd.init()``, so ssh asks the hosts."""

    name = "horovodrun"
    elastic = True

    def executables(self, settings: ClusterSettings) -> tuple[str, ...]:
        """Take the one beside this Python where PATH has none."""
        del settings
        return (self.name, os.path.join(os.path.dirname(sys.executable), self.name))

    def build(self, order: Order) -> Command:
        """See ``Backend``."""
        settings = order.settings
        options = HorovodOptions(
            controller="mpi" if settings.controller == "mpi" else "gloo",
            timeline=settings.timeline,
            min_ranks=settings.min_np,
            max_ranks=settings.max_np,
            discovery_script=settings.host_discovery_script,
        )
        command = build_horovodrun(order.job, options, order.program, order.extra)
        if options.elastic:
            command = self._warn(command)
        if options.controller == "mpi":  # mpirun hands on by name
            return command
        if order.only_here:
            return _hide_here(command, order)
        return _show_elsewhere(command, order) if options.elastic else _hide_elsewhere(command, order)

    @staticmethod
    def _warn(command: Command) -> Command:
        """Say what an elastic job opens: Horovod's own server, the only one that knows who comes and goes."""
        return replace(command, warnings=(*command.warnings, ELASTIC_RENDEZVOUS))

    def needs_own_name(self, settings: ClusterSettings) -> bool:
        """See ``Backend``."""
        return settings.controller == "gloo"


BACKEND = Horovodrun()
