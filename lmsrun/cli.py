"""From argv to an effect: the subcommands, their exit codes, and the only place that prints errors.

Imports that not all commands need are made where they are needed: the time to the first rank is a promise.
"""

import errno
import io
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from launch.model.errors import LmsrunError, PlanError, UsageError
from launch.model.text import printable
from lmsrun.file_checks import check_program, check_python
from lmsrun.options import (
    COMMANDS,
    LaunchOptions,
    Parsed,
    Request,
    check_variables,
    parse_argv,
    read_request,
)

if TYPE_CHECKING:
    from launch.cluster.job import Command
    from launch.model.plan import LaunchPlan
    from lmsrun.place import Place
    from lmsrun.resolve import ResolvedJob

INTERRUPTED, BROKEN_PIPE = 130, 141
_WRITE_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF})
"""What a write to a file that was opened elsewhere fails with, without a name in the error."""


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run one command line.

    Args:
        argv: Without the program's own name.
        environ: The environment.

    Returns:
        The exit code: 2 for a request that cannot be met, otherwise the command's own.
    """
    _accept_any_text()
    try:
        code = _dispatch(list(argv), environ)
        sys.stdout.flush()
    except LmsrunError as error:
        say(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        _drop_stdout()
        return BROKEN_PIPE
    except OSError as error:
        _drop_stdout()
        where = "standard output" if error.errno in _WRITE_ERRORS else "the system refuses"
        say(f"{error.filename or where}: {error.strerror or error}")
        return 1
    return code


def _accept_any_text() -> None:
    """What the encoding of stdout lacks (the lines of a tree, under ASCII) is escaped instead of fatal."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def _drop_stdout() -> None:
    """What is still buffered cannot be written; Python would complain of it at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def say(text: str) -> None:
    """One line to a person, whatever is in the text."""
    print(f"lmsrun: {printable(text, instead=' ')}", file=sys.stderr, flush=True)


def _dispatch(argv: list[str], environ: Mapping[str, str]) -> int:
    command = argv.pop(0) if argv and argv[0] in COMMANDS else "run"
    if command == "worker":
        return _work(argv, environ)
    if command == "probe-host":
        from launch.preflight.answer import main as answer

        return answer(argv, environ)
    parsed = _parse(command, argv)
    if parsed.wish == "version":
        from lmsrun import __version__

        print(f"lmsrun {__version__}")
        return 0
    if parsed.wish == "help":
        from lmsrun.help_text import render_help

        print(render_help(command))
        return 0
    if command in ("topo", "check"):
        _refuse_program(command, parsed)
    if command == "check":
        from lmsrun.check import main as examine

        return examine(bool(parsed.values.get("json")))
    request = read_request(parsed, environ, _folder())
    if request.options.verbose:
        _show_origins(request)
    if command == "topo":
        return _topo(request.options)
    try:
        return _run(request, parsed, environ, is_plan=command == "plan")
    except PlanError as error:
        raise error.named_by(request.origins) from None


def _work(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """A rank of another launcher: its options are variables, so these are checked as options are."""
    if argv and argv[0] in ("-h", "--help"):
        from lmsrun.help_text import render_help

        print(render_help("worker"))
        return 0
    if argv and argv[0].startswith("-") and argv[0] not in ("--", "--escaped"):
        raise UsageError(
            f"lmsrun worker takes no option, but found {argv[0]}; set LMSRUN_... variables instead, "
            "and write lmsrun worker -- PROGRAM ARGS"
        )
    check_variables(environ)
    from launch.rank.shim import main as work

    work(argv, environ)


def _folder() -> Path:
    try:
        return Path.cwd()
    except OSError as error:
        raise UsageError(f"the current folder cannot be found ({error.strerror}); try to cd again") from None


def _parse(command: str, argv: Sequence[str]) -> Parsed:
    """What the command line says; ``ddlrun`` may follow options of ours (after ``--`` it is a program)."""
    if command == "ddlrun":
        return parse_argv("run", _read_ddlrun(argv))
    parsed = parse_argv("run" if command == "plan" else command, argv)
    own = argv[: len(argv) - len(parsed.program)]
    if command in ("run", "plan") and parsed.program[:1] == ("ddlrun",) and own[-1:] != ["--"]:
        return parse_argv("run", [*own, *_read_ddlrun(parsed.program[1:])])
    return parsed


def _read_ddlrun(argv: Sequence[str]) -> list[str]:
    """IBM's command line in our words; what has no meaning today is said."""
    from launch.backends.ddlrun import parse_ddlrun

    request = parse_ddlrun(argv)
    for note in request.notes:
        say(note)
    return [*request.options, "--", *request.program]


def _refuse_program(command: str, parsed: Parsed) -> None:
    if parsed.program:
        raise UsageError(f"lmsrun {command} takes no program, but found {parsed.program[0]!r}")


def _show_origins(request: Request) -> None:
    from lmsrun.options import OPTIONS

    for field, origin in request.origins.items():
        say(f"{OPTIONS[field].name} = {getattr(request.options, field)} (from {origin})")


def _topo(options: LaunchOptions) -> int:
    from launch.discover import read_machine
    from launch.discover.saved import to_json
    from lmsrun.render import render_json

    machine = read_machine(options.topology)
    if options.save:
        try:
            Path(options.save).write_text(render_json(to_json(machine)) + "\n", encoding="utf-8")
        except OSError as error:
            raise UsageError(
                f"cannot write {options.save}: {error.strerror}; choose another --save"
            ) from None
        say(f"wrote {options.save}; replay it with --topology {options.save}")
    if options.json:
        print(render_json(to_json(machine)))
    elif not options.save:
        from lmsrun.render_topology import render_tree

        print(render_tree(machine))
    return 0


def _run(request: Request, parsed: Parsed, environ: Mapping[str, str], is_plan: bool) -> int:
    options = request.options
    if options.json and not (is_plan or options.dry_run):
        raise UsageError(
            f"{request.origins['json']} prints a plan; use `lmsrun plan --json`, or --output-dir DIR"
        )
    if options.print_script:
        return _print_script(request, parsed, environ)
    from lmsrun.resolve import resolve_job

    job = resolve_job(request, environ, is_plan)
    return _run_here(job) if job.place is None else _run_by_launcher(job, job.place)


def _run_here(job: "ResolvedJob") -> int:
    from launch.backends.local import plan_local_job

    ranks = job.options.num_proc or job.slots_of(job.request.host)
    if ranks == 0:
        raise PlanError("this machine has no CPU that the job may use; check the cpuset and the affinity")
    plan = plan_local_job(job.machine, replace(job.request, local_world_size=ranks, world_size=ranks))
    plan = replace(plan, warnings=(*plan.warnings, *job.warnings))
    if job.dry:
        return _show(plan, job)
    check_python(job.options.python, job.environ)
    _check_cpus(plan, job.options)
    return _start(plan, job)


def _print_script(request: Request, parsed: Parsed, environ: Mapping[str, str]) -> int:
    from launch.cluster.batch_script import render_script
    from launch.discover import read_machine
    from lmsrun.cluster_run import plan_script
    from lmsrun.options import render_argv

    check_program(request.program, True, environ)
    argv = render_argv(parsed, frozenset({"print_script", "hosts", "hostfile", "topology", "dry_run"}))
    job = plan_script(request.options, request.program, read_machine(request.options.topology), environ, argv)
    print(render_script(str(request.options.print_script), job), end="")
    return 0


def _run_by_launcher(job: "ResolvedJob", place: "Place") -> int:
    from lmsrun.cluster_run import plan_cluster, write_rankfile, written_files
    from lmsrun.preflight import probe_hosts, refuse_troubles

    options = job.options
    probed = probe_hosts(job, place)
    for trouble in probed.troubles:
        say(trouble)
    refuse_troubles(probed, len(place.hosts))
    job = job.answered(probed.machines, probed.warnings)
    plan, command = plan_cluster(job, place)
    if options.launcher == "auto" or options.verbose:
        say(f"launcher: {place.choice.name} ({place.choice.why})")
    if options.rankfile_out:
        say(write_rankfile(options.rankfile_out, place.backend, plan))
    if job.dry:
        return _show(plan, job)
    with written_files(command):
        return _start(plan, job, command)


def _show(plan: "LaunchPlan", job: "ResolvedJob") -> int:
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


def _start(plan: "LaunchPlan", job: "ResolvedJob", command: "Command | None" = None) -> int:
    from launch.supervise.job import JobOptions
    from launch.supervise.supervisor import run_job
    from lmsrun.render_receipts import render_receipts

    for warning in plan.warnings:
        say(f"warning: {warning}")
    options = job.options
    supervised = JobOptions(
        grace_period_s=options.grace_period,
        output_dir=Path(options.output_dir) if options.output_dir else None,
        tag_output=options.tag_output if command is None else False,
        numa=options.numa,
        receipt_timeout_s=options.receipt_timeout,
        verbose=options.verbose,
        environ=dict(job.environ),
        command=command,
    )
    return run_job(plan, supervised, render_receipts)
