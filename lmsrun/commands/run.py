"""``lmsrun run``: start a job; ``plan`` and ``ddlrun`` take the same way.

Imports that not all jobs need are made where they are needed: the time to the first rank is a promise.
"""

import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from launch.model.errors import LmsrunError, PlanError, UsageError
from lmsrun.commands.common import answer_wish, read_sources, say
from lmsrun.file_checks import check_program, check_python
from lmsrun.options import LaunchOptions, Parsed, Request, parse_argv
from lmsrun.resolve import ResolvedJob, resolve_job

if TYPE_CHECKING:
    from launch.cluster.job import Command
    from launch.model.plan import LaunchPlan
    from launch.system.job_board import JobNote
    from lmsrun.place import Place

USAGE = "lmsrun [run] -np N [options] [--] PROGRAM [ARGS]\n       lmsrun plan|topo|check|worker|ddlrun --help"
ABOUT = (
    "Start one bound process a GPU (or CPU ranks without GPUs), with Large Model Support on in each.\n"
    "A PROGRAM ending in .py runs under this Python. Everything after PROGRAM belongs to it."
)
EXAMPLES = (
    ("lmsrun -np 4 train.py --epochs 3", "four ranks on this machine"),
    ("lmsrun plan -np 6 --topology ac922.json train.py", "what it would be on another"),
    ("mpirun -np 4 lmsrun worker -- python train.py", "bound and verified under your own launcher"),
)


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
    request, is_plan = read_sources(parsed, environ), command == "plan"
    if is_plan:
        request = replace(request, options=replace(request.options, dry_run=True))
    try:
        return _run(request, parsed, environ, is_plan)
    except PlanError as error:
        raise error.named_by(request.origins) from None


def _run(request: Request, parsed: Parsed, environ: Mapping[str, str], is_plan: bool) -> int:
    options = request.options
    if options.json and not options.dry_run:
        raise UsageError(
            f"{request.origins['json']} prints a plan; use `lmsrun plan --json`, or --output-dir DIR"
        )
    if options.print_script:
        return _print_script(request, parsed, environ)
    job = _with_run_folder(resolve_job(request, environ, is_plan))
    return _run_here(job) if job.place is None else _run_by_launcher(job, job.place)


def _with_run_folder(job: ResolvedJob) -> ResolvedJob:
    """The job with a new folder of its own as its output folder; the folder is made when it starts."""
    if job.options.dry_run or not job.options.output_dir:
        return job
    from launch.cluster.batch_script import job_name
    from launch.supervise.run_folder import name_run_folder

    folder = name_run_folder(job.options.output_dir, job_name(job.request.program), time.time())
    return replace(job, options=replace(job.options, output_dir=str(folder)))


def _run_here(job: ResolvedJob) -> int:
    from launch.backends.local import plan_local_job
    from launch.plan_host.planner import plan_free_slots
    from lmsrun.commands.neighbours import look_around, open_board, write_down

    no_words: tuple[str, ...] = ()
    with open_board(job) as board:
        with board.turn() if not job.options.dry_run else nullcontext():
            request = replace(job.request, busy=look_around(job, board))
            ranks, said = job.options.num_proc, no_words
            if ranks is None:
                ranks, said = plan_free_slots(job.machine, job.options, job.request.environ, request.busy)
            if ranks == 0:
                raise PlanError(
                    "this machine has no CPU that the job may use; check the cpuset and the affinity"
                )
            plan = plan_local_job(job.machine, replace(request, local_world_size=ranks, world_size=ranks))
            plan = replace(plan, warnings=(*said, *plan.warnings, *job.warnings))
            if job.options.dry_run:
                return _show(plan, job)
            check_python(job.options.python, job.environ)
            _check_cpus(plan, job.options)
            note = write_down(job, plan, frozenset({job.request.host}), board)
    return _start_noted(plan, job, note)


def _start_noted(
    plan: "LaunchPlan", job: ResolvedJob, note: "JobNote | None", command: "Command | None" = None
) -> int:
    """Run the job; it is written down for others as long as it runs."""
    if note is None:
        return _start(plan, job, command)
    from launch.system.job_board import JOB_NOTE

    try:
        return _start(plan, replace(job, environ={**job.environ, JOB_NOTE: note.token}), command)
    finally:
        note.remove()


def _print_script(request: Request, parsed: Parsed, environ: Mapping[str, str]) -> int:
    from launch.cluster.batch_script import render_script
    from launch.discover import read_machine
    from launch.plan_host.rank_env import parse_forward
    from lmsrun.cluster_run import plan_script
    from lmsrun.options import render_argv

    check_program(request.program, True, environ)
    here = {"print_script", "walltime", "account", "partition", "hosts", "hostfile", "topology", "dry_run"}
    options = request.options
    given, _, _ = parse_forward(options.forward, environ, request.origins.get("forward", "-x"))
    if given:
        say(f"warning: the script holds the values of {', '.join(given)}; keep it from others")
    named = tuple(item.partition("=")[0] for item in parsed.values.get("forward", ()))
    typed = replace(parsed, values={**parsed.values, "forward": named} if named else parsed.values)
    argv = render_argv(typed, frozenset(here))
    job = plan_script(options, request.program, read_machine(options.topology), environ, argv)
    job = replace(job, exports=given)
    print(render_script(str(request.options.print_script), job), end="")
    return 0


def _run_by_launcher(job: ResolvedJob, place: "Place") -> int:
    from lmsrun.cluster_run import plan_cluster, write_rankfile, written_files
    from lmsrun.commands.neighbours import look_around, open_board, write_down
    from lmsrun.place import is_here
    from lmsrun.preflight import probe_hosts, refuse_troubles

    options = job.options
    probed = probe_hosts(job, place)
    for trouble in probed.troubles:
        say(trouble)
    refuse_troubles(probed, len(place.hosts))
    job = job.answered(probed.machines, probed.warnings)
    with open_board(job) as board:
        with board.turn() if not options.dry_run else nullcontext():
            if place.only_here:
                job = replace(job, request=replace(job.request, busy=look_around(job, board)))
            plan, command = plan_cluster(job, place)
            here = frozenset(host.name for host in place.hosts if is_here(host.name))
            note = None if options.dry_run else write_down(job, plan, here, board)
    if options.launcher == "auto" or options.verbose:
        say(f"launcher: {place.choice.name} ({place.choice.why})")
    if options.rankfile_out:
        say(write_rankfile(options.rankfile_out, place.backend, plan))
    if job.options.dry_run:
        return _show(plan, job)
    with written_files(command):
        return _start_noted(plan, job, note, command)


def _show(plan: "LaunchPlan", job: ResolvedJob) -> int:
    from lmsrun.render import print_plan

    print_plan(plan, job.machine, job.options.json, job.options.verbose, job.machines)
    return 0


def _check_cpus(plan: "LaunchPlan", options: LaunchOptions) -> None:
    """A plan for another machine must not start here."""
    here = os.sched_getaffinity(0)
    for rank in plan.ranks:
        if not rank.cpus <= here:
            from launch.model.idset import format_ids

            raise PlanError(
                f"rank {rank.rank} is planned on CPUs {format_ids(rank.cpus)}, but this process may use "
                f"{format_ids(here)}; is {options.topology or 'this'} another machine? try `lmsrun plan`"
            )


def _start(plan: "LaunchPlan", job: ResolvedJob, command: "Command | None" = None) -> int:
    from launch.supervise.job import JobOptions
    from launch.supervise.supervisor import run_job
    from lmsrun.render_receipts import render_receipts

    for warning in plan.warnings:
        say(f"warning: {warning}")
    options = job.options
    if options.output_dir:
        from launch.supervise.run_folder import make_run_folder, remove_unused

        make_run_folder(Path(options.output_dir))
    supervised = JobOptions(
        grace_period_s=options.grace_period,
        output_dir=Path(options.output_dir) if options.output_dir else None,
        tag_output=options.tag_output if command is None else False,
        numa=options.numa,
        receipt_timeout_s=options.receipt_timeout,
        verbose=options.verbose,
        environ=dict(job.environ),
        command_line=_shown_command_line(options),
        command=command,
    )
    if supervised.output_dir is None:
        return run_job(plan, supervised, render_receipts)
    say(f"output goes to {supervised.output_dir}")
    try:
        return run_job(plan, supervised, render_receipts)
    except LmsrunError:
        remove_unused(supervised.output_dir)
        raise


def _shown_command_line(options: LaunchOptions) -> tuple[str, ...]:
    """What was typed, with a mask in place of the values of variables."""
    secrets = [item for item in options.forward if "=" in item]
    shown = []
    for word in sys.argv:
        item = next((item for item in secrets if word.endswith(item)), None)
        shown.append(word if item is None else word.removesuffix(item) + item.partition("=")[0] + "=***")
    return tuple(shown)
