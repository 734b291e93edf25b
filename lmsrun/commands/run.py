"""``lmsrun run``: start a job; ``plan`` and ``ddlrun`` take the same way.

Imports that not all jobs need are made where they are needed: the time to the first rank is a promise.
"""

import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from launch.cluster.step import refuse_inside_step
from launch.model.errors import LmsrunError, PlanError, UsageError
from launch.model.rank_variables import ATTEMPT
from lmsrun.command_steps import answer_wish, describe_origin, read_sources, say
from lmsrun.file_checks import check_program, check_python
from lmsrun.options import LaunchOptions
from lmsrun.resolve import ResolvedJob, resolve_job
from lmsrun.sources.command_line import Parsed, parse_argv
from lmsrun.sources.request import Request
from lmsrun.sources.variables import leave_outer_job

if TYPE_CHECKING:
    from mmap import mmap
    from signal import Signals

    from launch.cluster.job import Command
    from launch.model.busy import Busy
    from launch.model.plan import LaunchPlan
    from launch.supervise.job import JobOptions
    from launch.system.job_board import JobNote
    from lmsrun.place import Place

    MakeCommand = Callable[[int, Path | None], Command]
    """Makes a launcher's command for an attempt, whose output goes to a folder."""

USAGE = (
    "lmsrun [run] -np N [options] [--] PROGRAM [ARGS]\n"
    "       lmsrun [run] -np N [options] -m MODULE [ARGS]\n"
    "       lmsrun help plan|topo|report|check|fit|top|worker|ddlrun|build-horovod|completion|version"
)
ABOUT = (
    "Start one bound process per GPU (or CPU ranks without GPUs), with Large Model Support on in each.\n"
    "A PROGRAM ending in .py, and -m MODULE, run under this Python. Everything after PROGRAM belongs to it."
)
EXAMPLES = (
    ("lmsrun -np 4 train.py --epochs 3", "four ranks on this machine"),
    ("lmsrun plan -np 6 --topology ac922.json train.py", "what it would be on another"),
    ("mpirun -np 4 lmsrun worker -- python train.py", "bound and verified under your own launcher"),
)
OPERAND = "PROGRAM"

_HOPELESS = {
    2: "its command line is wrong",
    126: "the program cannot be started",
    127: "the program is not there",
}


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run the job that a command line asks for; returns its exit code."""
    return obey("run", parse_command_line(argv), environ)


def parse_command_line(argv: Sequence[str]) -> Parsed:
    """Read options and program; ``ddlrun`` may follow options of ours (after ``--`` it is a program)."""
    parsed = parse_argv("run", argv)
    own = argv[: len(argv) - len(parsed.program)]
    if parsed.program[:1] == ("ddlrun",) and own[-1:] != ["--"]:
        from lmsrun.commands.ddlrun import translate

        return parse_argv("run", [*own, *translate(parsed.program[1:])])
    return parsed


def obey(command: str, parsed: Parsed, environ: Mapping[str, str]) -> int:
    """Do what was parsed; ``plan`` is a dry run that asks no host."""
    if answer_wish(command, parsed):
        return 0
    environ = leave_outer_job(environ)
    request, is_plan = read_sources(parsed, environ), command == "plan"
    if is_plan:
        request = replace(request, options=replace(request.options, dry_run=True))
    try:
        code = _run(request, parsed, environ, is_plan)
    except LmsrunError as error:
        raise error.named_by(request.origins) from error.__cause__
    if is_plan and not request.options.verbose:
        for field in sorted(request.from_files):
            say(describe_origin(request, field))
    return code


def _run(request: Request, parsed: Parsed, environ: Mapping[str, str], is_plan: bool) -> int:
    options = request.options
    if options.json and not options.dry_run:
        raise UsageError(
            f"{request.origins['json']} prints a plan; use `lmsrun plan --json`, or --output-dir DIR"
        )
    for drawn in ("svg", "png"):
        if getattr(options, drawn) and not options.dry_run:
            raise UsageError(f"{request.origins[drawn]} draws a plan; use `lmsrun plan --{drawn} FILE`")
    if options.print_script:
        return _print_script(request, parsed, environ)
    if not options.dry_run and options.launcher != "local":
        refuse_inside_step(environ)
    job = _with_run_folder(resolve_job(request, environ, is_plan))
    framework = job.framework
    is_worth_a_line = framework.name == "tensorflow" or options.verbose
    if options.framework == "auto" and is_worth_a_line and not options.quiet:
        say(f"framework: {framework.name} ({framework.why})")
    if framework.misses_horovod and not options.quiet:
        from lmsrun.wheels.build_horovod import describe_worth

        say(describe_worth())
    return _run_here(job) if job.place is None else _run_by_launcher(job, job.place)


def _with_run_folder(job: ResolvedJob) -> ResolvedJob:
    """Give the job a new folder of its own for output or reports; the folder is made when it starts."""
    if job.options.dry_run or not (job.options.output_dir or job.options.report):
        return job
    if not job.options.output_dir:
        temporary = job.environ.get("TMPDIR") or "/tmp"  # noqa: S108 - made with mode 0700 and a random name
        return replace(job, record_dir=os.path.abspath(f"{temporary}/lmsrun-report-{os.urandom(8).hex()}"))
    from launch.cluster.batch_script import job_name
    from launch.supervise.run_folder import name_run_folder

    folder = name_run_folder(job.options.output_dir, job_name(job.request.program), time.time())
    options = replace(job.options, output_dir=str(folder))
    return replace(job, options=options, record_dir=os.path.abspath(folder))


def _run_here(job: ResolvedJob) -> int:
    from launch.backends.local import plan_local_job
    from launch.plan_host.planner import plan_free_slots
    from lmsrun.neighbours import ask_gpus, look_around, open_board, write_down

    no_words: tuple[str, ...] = ()
    in_use = ask_gpus(job)
    with open_board(job) as board:
        with board.turn() if not job.options.dry_run else nullcontext():
            request = replace(job.request, busy=look_around(job, board, in_use))
            ranks, said = job.options.num_proc, no_words
            if ranks is None:
                ranks, said = plan_free_slots(job.machine, job.options, job.request.variables, request.busy)
            if ranks == 0:
                raise PlanError(
                    "this machine has no CPU that the job may use; check the cpuset and the affinity"
                )
            plan = plan_local_job(job.machine, replace(request, local_world_size=ranks, world_size=ranks))
            apart = _doubt_meeting(plan, job)
            plan = replace(plan, warnings=(*said, *plan.warnings, *job.warnings, *apart))
            if job.options.dry_run:
                return _show(plan, job)
            _say_ranks(plan, job.options)
            check_python(job.options.python, job.environ)
            _check_cpus(plan, job.options)
            note = write_down(job, plan, frozenset({job.request.host}), board)
    return _start_noted(plan, job, note)


def _say_ranks(plan: "LaunchPlan", options: LaunchOptions) -> None:
    """Say how many ranks start where the user has left that open."""
    if options.num_proc is None and not options.quiet and not options.dry_run:
        kind = "GPU" if plan.ranks[0].gpu else "core"
        say(f"ranks: {plan.world_size} (one per {kind}; -np N starts N)")


def _doubt_meeting(plan: "LaunchPlan", job: ResolvedJob) -> tuple[str, ...]:
    """Warn of ranks that do not know of each other, as far as the script tells."""
    if plan.world_size == 1 or not job.framework.is_apart:
        return ()
    doubt = (
        "the script names neither Horovod nor MultiWorkerMirroredStrategy; unless a module that it imports "
        "does, each rank trains a model of its own (see lms.hvd)"
    )
    return (doubt,)


def _start_noted(
    plan: "LaunchPlan", job: ResolvedJob, note: "JobNote | None", make_command: "MakeCommand | None" = None
) -> int:
    """Run the job; it is written down for others as long as it runs."""
    if note is None:
        return _start(plan, job, make_command)
    from launch.system.job_board import JOB_NOTE

    try:
        return _start(plan, replace(job, environ={**job.environ, JOB_NOTE: note.token}), make_command)
    finally:
        note.remove()


def _print_script(request: Request, parsed: Parsed, environ: Mapping[str, str]) -> int:
    from launch.cluster.batch_script import render_script
    from launch.cluster.job import forwarded_names
    from launch.discover import read_machine
    from launch.plan_host.rank_env import parse_forward
    from lmsrun.cluster_run import plan_script
    from lmsrun.options import OPTIONS
    from lmsrun.resolve import portable_environ
    from lmsrun.sources.command_line import render_argv

    check_program(request.program, True, environ)
    here = {"print_script", "hosts", "hostfile", "topology", "dry_run"}
    if in_file := sorted(here & request.from_files):
        raise UsageError(
            f"{request.origins[in_file[0]]} would count in the batch job, too; give it on the command line"
        )
    here |= {"walltime", "account", "partition"}
    options = request.options
    given, asked, unset = parse_forward(options.forward, environ, request.origins.get("forward", "-x"))
    for warning in unset:
        say(f"warning: {warning}")
    if given:
        say(f"warning: the script holds the values of {', '.join(given)}; keep it from others")
    named = {"forward": tuple(item.partition("=")[0] for item in options.forward)}
    typed = replace(parsed, values={**parsed.values, **(named if options.forward else {})})
    argv = render_argv(typed, frozenset(here))
    there = {**portable_environ(environ), **given}
    job = plan_script(options, request.program, read_machine(options.topology), there, argv)
    # These are said otherwise, or hold for this command alone.
    cleared = sorted({OPTIONS[field].env_name for field in here} & environ.keys())
    without = {*given, *cleared, OPTIONS["forward"].env_name}
    inherited = tuple(name for name in forwarded_names(environ, asked) if name not in without)
    job = replace(job, exports=given, inherited=inherited, cleared=cleared)
    script = os.fsencode(render_script(str(request.options.print_script), job))
    sys.stdout.flush()
    sys.stdout.buffer.write(script)
    return 0


def _run_by_launcher(job: ResolvedJob, place: "Place") -> int:
    from lmsrun.cluster_run import plan_cluster, write_rankfile
    from lmsrun.neighbours import ask_gpus, look_around, open_board, write_down
    from lmsrun.place import is_here
    from lmsrun.preflight import probe_hosts, refuse_troubles

    options = job.options
    probed = probe_hosts(job, place)
    for trouble in probed.troubles:
        say(trouble)
    refuse_troubles(probed, len(place.hosts))
    job = job.answered(probed.machines, probed.warnings)
    asked = job.options
    in_use = ask_gpus(job) if place.only_here else ()
    with open_board(job) as board:
        with board.turn() if not options.dry_run else nullcontext():
            if place.only_here:
                job = _take_free_slots(look_around(job, board, in_use), job, place)
            plan, command = plan_cluster(job, place)
            plan = replace(plan, warnings=(*plan.warnings, *_doubt_meeting(plan, job)))
            here = frozenset(host.name for host in place.hosts if is_here(host.name))
            note = None if options.dry_run else write_down(job, plan, here, board)
    if (options.launcher == "auto" or options.verbose) and not options.quiet:
        say(f"launcher: {place.choice.name} ({place.choice.why})")
    _say_ranks(plan, asked)
    if options.rankfile_out:
        say(write_rankfile(options.rankfile_out, place.backend, plan))
    if job.options.dry_run:
        return _show(plan, job)

    def make_command(attempt: int, folder: Path | None) -> "Command":
        if attempt == 0:
            return command
        changed = replace(job.options, output_dir=str(folder) if folder else None)
        return plan_cluster(replace(job, options=changed), place, attempt)[1]

    return _start_noted(plan, job, note, make_command)


def _take_free_slots(busy: "Busy", job: ResolvedJob, place: "Place") -> ResolvedJob:
    """Return a job of this host that knows what runs here; ``-np auto`` becomes what is free."""
    job = replace(job, request=replace(job.request, busy=busy))
    if job.options.num_proc is not None or any(host.slots is not None for host in place.hosts):
        return job
    from launch.plan_host.planner import plan_free_slots

    machine = job.machine_of(place.hosts[0].name)
    ranks, said = plan_free_slots(machine, job.options, job.request.variables, busy)
    # Without any slot the job is refused where ranks are dealt.
    options = replace(job.options, num_proc=ranks or None)
    return replace(job, options=options, warnings=(*said, *job.warnings))


def _show(plan: "LaunchPlan", job: ResolvedJob) -> int:
    from lmsrun.render.plan import print_plan

    options = job.options
    _check_stdin(options.stdin, plan.world_size)
    if options.svg or options.png:
        from lmsrun.command_steps import write_drawings
        from lmsrun.draw.marks import mark_plan
        from lmsrun.draw.plan import draw_plan

        machines = {rank.host: job.machine_of(rank.host) for rank in plan.ranks}
        write_drawings(draw_plan(mark_plan(plan), machines), options, job.environ)
    if options.json or not (options.svg or options.png):
        shown = replace(plan, warnings=()) if options.quiet and not options.json else plan
        print_plan(shown, job.machine, options.json, options.verbose, job.machines)
    return 0


def _check_cpus(plan: "LaunchPlan", options: LaunchOptions) -> None:
    """Refuse a plan for another machine: it must not start here."""
    here = os.sched_getaffinity(0)
    for rank in plan.ranks:
        if not rank.cpus <= here:
            from launch.model.idset import format_ids

            raise PlanError(
                f"rank {rank.rank} is planned on CPUs {format_ids(rank.cpus)}, but this process may use "
                f"{format_ids(here)}; is {options.topology or 'this'} another machine? try `lmsrun plan`"
            )


def _start(plan: "LaunchPlan", job: ResolvedJob, make_command: "MakeCommand | None" = None) -> int:
    from launch.preflight.hold_environment import endings_raised
    from launch.supervise.job import JobOptions
    from lmsrun.report.recording import recorded

    options = job.options
    _check_stdin(options.stdin, plan.world_size)
    if options.live:
        from lmsrun.watching import check_live

        check_live(options)
    for warning in () if options.quiet else plan.warnings:
        say(f"warning: {warning}")
    supervised = JobOptions(
        grace_period_s=options.grace_period,
        output_dir=Path(options.output_dir) if options.output_dir else None,
        record_dir=Path(job.record_dir) if job.record_dir and not options.output_dir else None,
        tag_output=options.tag_output,
        numa=options.numa,
        receipt_timeout_s=options.receipt_timeout,
        stall_timeout_s=options.stall_timeout,
        stall_kill=options.stall_kill,
        verbose=options.verbose,
        environ=dict(job.environ),
        command_line=_shown_command_line(options),
        title=shlex.join(job.request.program),
        last_stage=job.framework.last_stage,
        timestamps=options.timestamps,
        quiet=options.quiet,
        stdin=options.stdin,
    )
    with endings_raised(), recorded(plan, job):
        if supervised.output_dir is not None and not options.quiet:
            say(f"output goes to {supervised.output_dir}")
        heard: set[Signals] = set()
        with _watched(options, supervised, heard) as watched:
            return _run_often_enough(plan, watched, make_command, options.max_restarts, heard)


def _watched(
    options: LaunchOptions, supervised: "JobOptions", heard: "set[Signals]"
) -> "AbstractContextManager[JobOptions]":
    """Have the job followed by ``lmsrun top`` where that is asked for."""
    if not (options.live or options.metrics):
        return nullcontext(supervised)
    from lmsrun.watching import watched

    return watched(options, supervised, heard)


def _run_often_enough(
    plan: "LaunchPlan",
    options: "JobOptions",
    make_command: "MakeCommand | None",
    restarts: int,
    heard: "set[Signals]",
) -> int:
    """Run a job, and again while ranks fail by themselves with a code that another attempt may change."""
    from mmap import mmap  # What the supervisor, another process, writes is to be seen here.

    rank_failed, give_again = mmap(-1, 1), _keep_stdin(options.stdin if restarts else None)
    earlier: tuple[dict[str, object], ...] = ()
    for attempt in range(restarts + 1):
        rank_failed[0] = 0
        told = replace(
            options,
            environ={**options.environ, ATTEMPT: str(attempt)},
            job_dir=options.output_dir,
            earlier=earlier,
        )
        code = _run_attempt(plan, told, make_command, attempt, rank_failed, heard)
        if not rank_failed[0] or not restarts:
            break
        if code in _HOPELESS:
            say(f"not started again: code {code} says that {_HOPELESS[code]}")
            break
        if attempt < restarts:
            if heard:
                say(f"not started again: {min(heard).name} came as the ranks ended")
                return 128 + min(heard)
            say(f"a rank failed with code {code}; restart {attempt + 1} of {restarts}{give_again()}")
            if options.output_dir is not None:
                from launch.supervise.run_folder import set_aside

                earlier = (*earlier, set_aside(options.output_dir, attempt))
    return code


def _keep_stdin(rank: int | None) -> "Callable[[], str]":
    """Note where standard input begins; returns what gives it again, or says that it cannot be."""
    if rank is None:
        return str
    try:
        start = os.lseek(0, 0, os.SEEK_CUR)
    except OSError:
        return lambda: f"; rank {rank} reads on where the last attempt stopped, for standard input is no file"

    def give_again() -> str:
        os.lseek(0, start, os.SEEK_SET)
        return ""

    return give_again


def _run_attempt(
    plan: "LaunchPlan",
    options: "JobOptions",
    make_command: "MakeCommand | None",
    number: int,
    rank_failed: "mmap",
    heard: "set[Signals]",
) -> int:
    """Run one attempt, with a folder, and for a launcher a command and its files, of its own."""
    from launch.supervise.supervisor import run_job
    from lmsrun.render.receipts import render_receipts

    folder = options.output_dir
    if number and folder is not None:
        from launch.supervise.run_folder import restart_folder

        folder = folder / restart_folder(number)
    options = replace(options, output_dir=folder)
    if make_command is None:
        return run_job(plan, options, render_receipts, rank_failed, heard)
    from lmsrun.cluster_run import written_files

    command = make_command(number, folder)
    with written_files(command):
        return run_job(plan, replace(options, command=command), render_receipts, rank_failed, heard)


def _check_stdin(rank: int | None, world_size: int) -> None:
    """Refuse a reader that does not exist, and one for an input that is closed.

    Raises:
        UsageError: Saying what there is.
    """
    if rank is None:
        return
    if rank >= world_size:
        raise UsageError(f"--stdin {rank}: there is no such rank; needed none or 0 to {world_size - 1}")
    if sys.stdin is None:
        raise UsageError(f"--stdin {rank}: standard input is closed; leave it open, or leave --stdin out")


def _shown_command_line(options: LaunchOptions) -> tuple[str, ...]:
    """Mask the values of variables in what was typed."""
    secrets = [item for item in options.forward if "=" in item]
    shown = []
    for word in sys.argv:
        item = next((item for item in secrets if word.endswith(item)), None)
        shown.append(word if item is None else word.removesuffix(item) + item.partition("=")[0] + "=***")
    return tuple(shown)
