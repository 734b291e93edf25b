"""From a request to a job that another launcher starts: the effects around ``launch.cluster.planner``."""

import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from tempfile import gettempdir

from launch.backends.backend import Backend, Order
from launch.backends.choice import LauncherChoice, Surroundings, choose_launcher
from launch.backends.registry import FOREIGN, find_launchers, load_backend
from launch.cluster.allocation import Allocation, read_allocation, refuse_inside_step
from launch.cluster.batch_script import BatchJob, job_name, nodes_for
from launch.cluster.hosts import (
    Host,
    HostShare,
    count_slots,
    is_name_of,
    parse_hostfile,
    parse_hosts,
    refuse_aliases,
    resolve_slots,
    restrict_hosts,
    share_ranks,
)
from launch.cluster.job import ClusterJob, Command
from launch.cluster.planner import build_job, plan_shares
from launch.model.errors import JobError, UsageError
from launch.model.plan import LaunchPlan, RankPlan
from launch.model.topology import Machine
from launch.plan_host.planner import HostRequest, plan_slots
from lms.config import read_text_file
from lmsrun.options import LaunchOptions


@dataclass(frozen=True)
class Place:
    """Where a job runs and what starts it there."""

    choice: LauncherChoice
    hosts: tuple[Host, ...]
    only_here: bool
    """Whether every rank runs on this host, for sure."""
    allocation: Allocation | None
    found: Mapping[str, str]
    discovered: bool = False
    """Whether a script of the user's names the hosts while the job runs; ``hosts`` stand in for them."""

    @property
    def is_local(self) -> bool:
        """Whether lmsrun starts the ranks itself."""
        return self.choice.name not in FOREIGN

    @property
    def backend(self) -> Backend:
        """The launcher, if it is not lmsrun itself."""
        return load_backend(self.choice.name)


def find_place(options: LaunchOptions, environ: Mapping[str, str]) -> Place:
    """Read hosts and allocation, and pick the launcher.

    Raises:
        UsageError: If hosts, allocation and launcher contradict each other.
    """
    refuse_inside_step(environ)
    allocation = read_allocation(environ)
    hosts = _read_hosts(options, allocation)
    discovered = options.host_discovery_script is not None
    only_here = not discovered and all(is_here(host.name) for host in hosts)
    found = find_launchers(options, environ)
    elastic = any((options.min_np, options.max_np, options.host_discovery_script))
    if elastic:
        _check_elastic(options, len(hosts))
    around = Surroundings(len(hosts), only_here, allocation, found, elastic)
    return Place(choose_launcher(options.launcher, around), hosts, only_here, allocation, found, discovered)


def _check_elastic(options: LaunchOptions, hosts: int) -> None:
    """Refuse what Horovod would refuse only once it runs."""
    counts = {"--min-np": options.min_np, "-np": options.num_proc, "--max-np": options.max_np}
    given = [(name, count) for name, count in counts.items() if isinstance(count, int)]
    for (low, fewer), (high, more) in pairwise(given):
        if fewer > more:
            raise UsageError(f"{low} {fewer} is more than {high} {more}; needed --min-np <= -np <= --max-np")
    if options.host_discovery_script is None and hosts < 2:
        raise UsageError(
            "elastic ranks need hosts that can come and go, found one; "
            "give --host-discovery-script, or at least two hosts (-H)"
        )


def plan_cluster(
    place: Place,
    options: LaunchOptions,
    request: HostRequest,
    machine_of: Callable[[str], Machine],
    environ: Mapping[str, str],
    asked: Sequence[str],
    dry: bool,
) -> tuple[LaunchPlan, Command]:
    """Plan a job that another launcher starts.

    Args:
        place: From ``find_place``.
        options: The user's.
        request: What all hosts share; its rank counts are set here.
        machine_of: The machine of a host.
        environ: The environment that the launcher inherits.
        asked: Names of variables to hand on.
        dry: Whether nothing will be started, so that launchers that are not here may be planned for.

    Raises:
        LmsrunError: If the request cannot be met.
    """
    hosts = resolve_slots(place.hosts, lambda name: plan_slots(machine_of(name), options, request.environ))
    shares = share_ranks(hosts, options.num_proc, options.oversubscribe or place.discovered)
    # The slots were checked over all hosts: one of them may take more than its machine would by itself.
    more = options.oversubscribe or _exceeds(shares, machine_of, request)
    settings = replace(request.settings, oversubscribe=more)
    request = replace(request, world_size=sum(share.ranks for share in shares), settings=settings)
    planned = plan_shares(shares, machine_of, request)
    job = build_job(shares, options, request, environ, asked, place.only_here, options.tag_output)
    if options.output_dir:
        job = replace(job, env={**job.env, "LMSRUN_OUTPUT_DIR": os.path.abspath(options.output_dir)})
    command = _build_command(place, options, job, planned.ranks, environ, dry)
    plan = LaunchPlan(request.world_size, place.choice.name, planned.ranks, (command.argv,), planned.warnings)
    return plan, command


def plan_script(
    options: LaunchOptions,
    program: Sequence[str],
    machine: Machine,
    environ: Mapping[str, str],
    argv: Sequence[str],
) -> BatchJob:
    """What a batch system is to be asked for, so that ``lmsrun`` with ``argv`` finds the places in there.

    Args:
        options: The user's; hosts count, their names do not.
        program: For the job's name.
        machine: What a node of the cluster is like.
        environ: The environment.
        argv: What lmsrun is told in the job.

    Raises:
        UsageError: If the ranks do not fill whole nodes, or the hosts differ in slots.
    """
    elsewhere = {name: value for name, value in environ.items() if not name.endswith("_VISIBLE_DEVICES")}
    slots = plan_slots(machine, options, elsewhere)
    hosts = resolve_slots(_read_hosts(options, None), lambda name: slots)
    sizes = {host.slots or slots for host in hosts}
    if len(sizes) > 1:
        raise UsageError(
            f"hosts have {', '.join(map(str, sorted(sizes)))} slots; a batch script asks for equal nodes. "
            "Give each host the same number"
        )
    ranks = options.num_proc or count_slots(hosts)
    per_node = min(*sizes, ranks)
    gpus = min(per_node, len(machine.gpus)) if options.gpus != "none" else 0
    nodes, cores = nodes_for(ranks, per_node), len(machine.cores)
    return BatchJob(job_name(program), nodes, per_node, gpus, cores, ("lmsrun", "run", *argv))


def write_rankfile(path: str, backend: Backend, plan: LaunchPlan) -> str:
    """Write the plan as the rank file of its launcher; returns what to say.

    Raises:
        UsageError: If it cannot be written.
    """
    text = backend.render_rankfile(plan.ranks)
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}; choose another --rankfile-out") from None
    return f"wrote {path}"


@contextmanager
def written_files(command: Command) -> Iterator[None]:
    """Have what a command needs beside it, in a folder of this job's own, for as long as the job runs.

    Raises:
        JobError: If there is no place for it.
    """
    folders = {Path(path).parent for path in command.files}
    try:
        _write_files(command.files, folders)
        yield
    finally:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)


def _write_files(files: Mapping[str, str], folders: set[Path]) -> None:
    """Only into folders that did not exist: one that is there may be somebody else's, or hold links."""
    for folder in sorted(folders):
        try:
            folder.mkdir(mode=0o700)
        except OSError as error:
            folders.remove(folder)
            raise JobError(
                f"cannot make {folder}: {error.strerror}; set TMPDIR to a folder for it"
            ) from error
    for path, text in files.items():
        try:
            Path(path).write_text(text, encoding="utf-8")
        except OSError as error:
            raise JobError(f"cannot write {path}: {error.strerror}; set TMPDIR to a folder for it") from error


def _read_hosts(options: LaunchOptions, allocation: Allocation | None) -> tuple[Host, ...]:
    hosts, where = _named_hosts(options, allocation)
    refuse_aliases(hosts, os.uname().nodename, where)
    return hosts or (Host("localhost"),)


def _named_hosts(options: LaunchOptions, allocation: Allocation | None) -> tuple[tuple[Host, ...], str]:
    """The hosts that somebody named, and who did."""
    known: tuple[Host, ...] = ()
    where = ""
    if options.hostfile:
        known, where = parse_hostfile(_read_text(options.hostfile), options.hostfile), options.hostfile
    elif allocation is not None:
        known, where = allocation.hosts, allocation.title
    if options.hosts:
        wanted = parse_hosts(options.hosts)
        return (restrict_hosts(wanted, known, where) if known else wanted), "--hosts"
    return known, where


def _read_text(path: str) -> str:
    try:
        return read_text_file(Path(path))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"cannot read the hostfile {path}: {reason}") from None


def is_here(name: str) -> bool:
    """Whether a host's name is this host's."""
    return is_name_of(name, os.uname().nodename)


def _exceeds(shares: Sequence[HostShare], machine_of: Callable[[str], Machine], request: HostRequest) -> bool:
    slots = {
        share.host: plan_slots(machine_of(share.host), request.settings, request.environ) for share in shares
    }
    return any(share.ranks > slots[share.host] for share in shares)


def _build_command(
    place: Place,
    options: LaunchOptions,
    job: ClusterJob,
    ranks: Sequence[RankPlan],
    environ: Mapping[str, str],
    dry: bool,
) -> Command:
    backend = place.backend
    program = place.found.get(backend.name)
    return backend.build(
        Order(
            program=program or backend.executables(options)[0],
            is_here=program is not None,
            only_here=place.only_here,
            settings=options,
            job=job,
            ranks=ranks,
            environ=environ,
            dry=dry,
            files_dir=new_files_dir(environ),
        )
    )


def new_files_dir(environ: Mapping[str, str]) -> str:
    """A folder for ``written_files``: not there yet, under a name that nobody can guess."""
    return f"{environ.get('TMPDIR') or gettempdir()}/lmsrun-files-{secrets.token_hex(8)}"
