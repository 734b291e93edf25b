"""From a resolved job to what another launcher is told: the effects around ``launch.cluster.planner``."""

import os
import secrets
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import gettempdir

from launch.backends.backend import Backend, Order
from launch.cluster.batch_script import BatchJob, job_name, nodes_for
from launch.cluster.hosts import HostShare, count_slots, resolve_slots
from launch.cluster.job import Command
from launch.cluster.planner import build_job, plan_shares
from launch.model.busy import BUSY, Busy, busy_to_text
from launch.model.errors import JobError, UsageError
from launch.model.plan import LaunchPlan
from launch.model.rank_variables import ATTEMPT
from launch.model.settings import QUIET
from launch.model.text import count_of
from launch.model.topology import Machine
from launch.plan_host.planner import plan_slots
from launch.system.output_file import write_whole
from lms.config import REPORT_VARIABLE
from lmsrun.options import LaunchOptions
from lmsrun.place import Place, read_hosts
from lmsrun.resolve import ResolvedJob


def plan_cluster(resolved: ResolvedJob, place: Place, attempt: int = 0) -> tuple[LaunchPlan, Command]:
    """Plan a job that another launcher starts.

    Args:
        resolved: The job.
        place: Where it runs, and by which launcher.
        attempt: How often it has been started before.

    Raises:
        LmsrunError: If the request cannot be met.
    """
    options = resolved.options
    shares = resolved.deal(place, options.oversubscribe or place.discovered)
    # The slots were checked over all hosts: one of them may take more than its machine would by itself.
    crowded = any(share.ranks > resolved.slots_of(share.host) for share in shares)
    request = replace(
        resolved.request,
        world_size=sum(share.ranks for share in shares),
        settings=replace(options, oversubscribe=options.oversubscribe or crowded),
    )
    planned = plan_shares(shares, resolved.machine_of, request)
    job = build_job(
        shares, options, request, resolved.environ, resolved.asked, place.only_here, options.tag_output
    )
    reader = "none" if options.stdin is None else str(options.stdin)
    job = replace(job, stdin=options.stdin, env={**job.env, "LMSRUN_STDIN": reader})
    record = resolved.record_dir
    if options.output_dir:
        record = os.path.abspath(options.output_dir)
        job = replace(job, env={**job.env, "LMSRUN_OUTPUT_DIR": record})
    if record and not {**resolved.environ, **request.given}.get(REPORT_VARIABLE):
        job = replace(job, env={**job.env, REPORT_VARIABLE: record})
    job = replace(job, env={**job.env, ATTEMPT: str(attempt), **({QUIET: "1"} if options.quiet else {})})
    busy = request.busy.on(resolved.machine)
    if busy != Busy():
        job = replace(job, env={**job.env, BUSY: busy_to_text(busy)})
    backend = place.backend
    command = backend.build(
        Order(
            program=place.program or backend.executables(options)[0],
            is_here=place.program is not None and resolved.may_ask_mpirun,
            only_here=place.only_here,
            settings=options,
            job=job,
            ranks=planned.ranks,
            environ=resolved.environ,
            dry=options.dry_run,
            files_dir=new_files_dir(resolved.environ),
        )
    )
    command = replace(command, only_here=place.only_here)
    warnings = (*planned.warnings, *resolved.warnings, *_say_idle(place, shares))
    plan = LaunchPlan(
        request.world_size,
        backend.name,
        planned.ranks,
        (command.argv,),
        (*warnings, *command.warnings),
        frozenset(request.given),
        options.framework,
        options.tf_port,
        options.gpu_memory_bytes,
    )
    return plan, command


def _say_idle(place: Place, shares: Sequence[HostShare]) -> tuple[str, ...]:
    busy = {share.host for share in shares}
    # A discovery script's hosts may be there for later, and an allocation's are not the user's choice.
    idle = [host.name for host in place.hosts if host.name not in busy]
    if not idle or place.discovered:
        return ()
    first = shares[0]
    spread = ",".join(f"{host.name}:1" for host in place.hosts)
    room = f"{first.host} has room for {count_of(first.ranks, 'rank')} and is filled first"
    return (f"no rank runs on {', '.join(idle)}: {room}; slots spread them, as in -H {spread}",)


def plan_script(
    options: LaunchOptions,
    program: Sequence[str],
    machine: Machine,
    environ: Mapping[str, str],
    argv: Sequence[str],
) -> BatchJob:
    """Plan what to ask a batch system for, so that ``lmsrun`` with ``argv`` finds the places in there.

    Args:
        options: The user's; hosts count, their names do not.
        program: For the job's name.
        machine: What a node of the cluster is like.
        environ: What the ranks will have of the user's variables.
        argv: What lmsrun is told in the job.

    Raises:
        UsageError: If the ranks do not fill whole nodes, or the hosts differ in slots.
    """
    slots = plan_slots(machine, options, environ)
    hosts = resolve_slots(read_hosts(options, None), lambda host: slots)
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
    return BatchJob(
        job_name(program),
        nodes,
        per_node,
        gpus,
        cores,
        ("lmsrun", "run", *argv),
        options.walltime,
        options.account,
        options.partition,
        os.path.dirname(sys.executable),
    )


def write_rankfile(path: str, backend: Backend, plan: LaunchPlan) -> str:
    """Write the plan as the rank file of its launcher; returns what to say.

    Raises:
        UsageError: If it cannot be written.
    """
    text = backend.render_rankfile(plan.ranks)
    try:
        write_whole(path, text)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}; choose another --rankfile-out") from None
    return f"wrote {path}"


@contextmanager
def written_files(command: Command, timeout_s: float = 20.0) -> Iterator[None]:
    """Have what a command needs beside it, in a folder of this job's own, for as long as the job runs.

    Args:
        command: The launcher's.
        timeout_s: How long other hosts may take to have it, too.

    Raises:
        JobError: If there is no place for it.
    """
    folders = {Path(path).parent for path in command.files}
    try:
        _write_files(command.files, folders)
        with ExitStack() as stack:
            if command.elsewhere:
                from launch.preflight.hold_environment import endings_raised, hold_environment

                with endings_raised():
                    for path, text in command.files.items():
                        stack.enter_context(hold_environment(command.elsewhere, path, text, timeout_s))
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
            with open(path, "w", encoding="utf-8", opener=_open_private) as file:
                file.write(text)
        except OSError as error:
            raise JobError(f"cannot write {path}: {error.strerror}; set TMPDIR to a folder for it") from error


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_EXCL, 0o600)


def new_files_dir(environ: Mapping[str, str]) -> str:
    """Name a folder for ``written_files``: not there yet, under a name that nobody can guess."""
    return f"{os.path.abspath(environ.get('TMPDIR') or gettempdir())}/lmsrun-files-{secrets.token_hex(8)}"
