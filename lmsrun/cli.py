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

from launch.model.cluster_settings import find_unread, has_allocation
from launch.model.errors import LmsrunError, PlanError, UsageError
from launch.model.text import printable
from launch.system.program_path import find_program
from lms.config import doubtful_variables, nearest
from lmsrun.file_checks import check_named_files, check_timeline
from lmsrun.options import (
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
    from launch.model.topology import Machine
    from launch.plan_host.planner import HostRequest
    from lmsrun.cluster_run import Place

COMMANDS = ("run", "plan", "topo", "worker", "check", "ddlrun", "probe-host")
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
        _say(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        _drop_stdout()
        return BROKEN_PIPE
    except OSError as error:
        _drop_stdout()
        where = "standard output" if error.errno in _WRITE_ERRORS else "the system refuses"
        _say(f"{error.filename or where}: {error.strerror or error}")
        return 1
    return code


def _accept_any_text() -> None:
    """What the encoding of stdout lacks (the lines of a tree, under ASCII) is escaped instead of fatal."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def _drop_stdout() -> None:
    """What is still buffered cannot be written; Python would complain of it at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _say(text: str) -> None:
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
        _say(note)
    return [*request.options, "--", *request.program]


def _refuse_program(command: str, parsed: Parsed) -> None:
    if parsed.program:
        raise UsageError(f"lmsrun {command} takes no program, but found {parsed.program[0]!r}")


def _show_origins(request: Request) -> None:
    from lmsrun.options import OPTIONS

    for field, origin in request.origins.items():
        _say(f"{OPTIONS[field].name} = {getattr(request.options, field)} (from {origin})")


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
        _say(f"wrote {options.save}; replay it with --topology {options.save}")
    if options.json:
        print(render_json(to_json(machine)))
    elif not options.save:
        from lmsrun.render_topology import render_tree

        print(render_tree(machine))
    return 0


def _run(request: Request, parsed: Parsed, environ: Mapping[str, str], is_plan: bool) -> int:
    options = request.options
    dry = is_plan or options.dry_run
    if options.json and not dry:
        raise UsageError(
            f"{request.origins['json']} prints a plan; use `lmsrun plan --json`, or --output-dir DIR"
        )
    if options.print_script:
        return _print_script(request, parsed, environ)
    check_named_files(request, environ, dry)
    place, request = _find_place(request, environ)
    _check_program(request.program, dry or (place is not None and not place.only_here), environ)
    if not dry and (place is None or place.only_here):
        check_timeline(request)
    if place is not None:
        return _run_by_launcher(place, request, environ, is_plan)
    plan, machine = _plan(request, environ)
    if dry:
        from lmsrun.render import print_plan

        print_plan(plan, machine, as_json=options.json, verbose=options.verbose)
        return 0
    _check_python(options.python, environ)
    _check_cpus(plan, options)
    for warning in plan.warnings:
        _say(f"warning: {warning}")
    return _start(plan, options, environ)


def _check_program(program: Sequence[str], dry: bool, environ: Mapping[str, str]) -> None:
    """A program that is not there must not cost a job; a plan may be for another machine."""
    if not program:
        raise UsageError("no program; needed lmsrun -np N [options] PROGRAM [ARGS] (see lmsrun --help)")
    name = program[0]
    if dry or (os.path.isfile(name) if name.endswith(".py") else find_program(name, environ.get("PATH"))):
        return
    if name in COMMANDS:
        raise UsageError(f"{name!r} is a command of lmsrun and goes first: lmsrun {name} [options] PROGRAM")
    raise UsageError(f"program {name!r} {_why_not(name)}")


def _why_not(program: str) -> str:
    """What is wrong with a program that cannot be started, and what to do."""
    if os.path.isdir(program):
        return "is a folder; needed a program, or a script whose name ends in .py"
    if os.path.isfile(program) and os.access(program, os.X_OK):
        return f"is not in PATH; try ./{program}"
    if os.path.isfile(program):
        return "cannot be executed; try chmod +x, or for Python a name that ends in .py"
    is_python = program.endswith(".py")
    here = [entry.name for entry in Path.cwd().glob("*.py") if entry.is_file()] if is_python else COMMANDS
    return f"is not there, or cannot be executed{nearest(program, frozenset(here)) or '; check its path'}"


def _check_python(python: str | None, environ: Mapping[str, str]) -> None:
    if python and find_program(python, environ.get("PATH")) is None:
        raise UsageError(f"--python {python} is not there, or cannot be executed; needed an interpreter")


def _find_place(request: Request, environ: Mapping[str, str]) -> "tuple[Place | None, Request]":
    """Where the job runs; None: on this host, started by lmsrun itself, one rank a slot."""
    options = request.options
    asked = (
        options.hosts or options.hostfile or options.host_discovery_script or options.min_np or options.max_np
    )
    allocated = options.launcher == "auto" and has_allocation(environ)
    if options.launcher in ("auto", "local") and not asked and not allocated:
        return None, request
    from launch.cluster.hosts import share_ranks
    from lmsrun.cluster_run import find_place

    place = find_place(options, environ)
    if not place.is_local:
        return place, request
    if any(host.slots is None for host in place.hosts):  # The machine's own slots count.
        return None, request
    ranks = sum(share.ranks for share in share_ranks(place.hosts, options.num_proc, options.oversubscribe))
    return None, replace(request, options=replace(options, num_proc=ranks))


def _print_script(request: Request, parsed: Parsed, environ: Mapping[str, str]) -> int:
    from launch.cluster.batch_script import render_script
    from launch.discover import read_machine
    from lmsrun.cluster_run import plan_script
    from lmsrun.options import render_argv

    _check_program(request.program, True, environ)
    argv = render_argv(parsed, frozenset({"print_script", "hosts", "hostfile", "topology", "dry_run"}))
    job = plan_script(request.options, request.program, read_machine(request.options.topology), environ, argv)
    print(render_script(str(request.options.print_script), job), end="")
    return 0


def _run_by_launcher(place: "Place", request: Request, environ: Mapping[str, str], is_plan: bool) -> int:
    from launch.discover import read_machine
    from lmsrun.cluster_run import plan_cluster, write_rankfile, written_files
    from lmsrun.preflight import probe_hosts, refuse_troubles

    options = request.options
    dry = is_plan or options.dry_run
    machine = read_machine(options.topology)
    host_request, names, warnings = _host_request(request, environ, machine, place)
    probed = probe_hosts(place, options, host_request, machine, environ, names, is_plan, dry)
    for trouble in probed.troubles:
        _say(trouble)
    refuse_troubles(probed, len(place.hosts))
    machine_of = {host.name: probed.machines.get(host.name, machine) for host in place.hosts}.__getitem__
    plan, command = plan_cluster(place, options, host_request, machine_of, environ, names, dry)
    plan = _with_warnings(plan, [*probed.warnings, *warnings])
    if options.launcher == "auto" or options.verbose:
        _say(f"launcher: {place.choice.name} ({place.choice.why})")
    if options.rankfile_out:
        _say(write_rankfile(options.rankfile_out, place.backend, plan))
    if dry:
        from lmsrun.render import print_plan

        print_plan(plan, machine, options.json, options.verbose, probed.machines)
        return 0
    for warning in plan.warnings:
        _say(f"warning: {warning}")
    with written_files(command):
        return _start(plan, options, environ, command)


def _plan(request: Request, environ: Mapping[str, str]) -> "tuple[LaunchPlan, Machine]":
    from launch.backends.local import plan_local_job
    from launch.discover import read_machine
    from launch.plan_host.planner import plan_slots

    machine = read_machine(request.options.topology)
    host_request, _, warnings = _host_request(request, environ, machine, None)
    ranks = request.options.num_proc or plan_slots(machine, request.options, host_request.environ)
    if ranks == 0:
        raise PlanError("this machine has no CPU that the job may use; check the cpuset and the affinity")
    plan = plan_local_job(machine, replace(host_request, local_world_size=ranks, world_size=ranks))
    return _with_warnings(plan, warnings), machine


def _host_request(
    request: Request, environ: Mapping[str, str], machine: "Machine", place: "Place | None"
) -> "tuple[HostRequest, tuple[str, ...], list[str]]":
    """What the planner is asked, but for the ranks' number; the names that ``-x`` hands on; warnings."""
    from launch.installed.binding_tools import assume_tools, choose_tools
    from launch.model.lms_settings import read_lms_config
    from launch.plan_host.planner import HostRequest
    from launch.plan_host.rank_env import parse_forward

    options = request.options
    only_here = place is None or place.only_here
    unread = _doubt_unread(request, "local" if place is None else place.choice.name)
    given, names, unset = parse_forward(options.forward, environ, request.origins.get("forward", "-x"))
    is_live = not options.topology
    # What is hidden from CUDA here says nothing about another machine.
    users = (
        dict(environ)
        if is_live and only_here
        else {k: v for k, v in environ.items() if not k.endswith("_VISIBLE_DEVICES")}
    )
    host_request = HostRequest(
        program=request.program,
        local_world_size=1,
        world_size=1,
        settings=options,
        lms=read_lms_config(options, {**environ, **given}, request.lms_table),
        tools=choose_tools(machine, options) if is_live else assume_tools(machine),
        environ=users,
        given=given,
    )
    return host_request, names, [*unread, *unset, *doubtful_variables({*environ, *given})]


def _doubt_unread(request: Request, launcher: str) -> list[str]:
    """Warnings for options that were typed and mean nothing to the launcher; a file serves many jobs."""
    warnings = []
    for field, readers in find_unread(request.origins, launcher).items():
        origin = request.origins[field]
        said = f"{origin} means nothing to the launcher {launcher}, only to {', '.join(readers)}"
        if field == "rankfile_out":
            raise UsageError(f"{said}; try --launcher mpirun, or leave it out")
        if origin.startswith("-"):
            warnings.append(f"{said}; it is left out")
    return warnings


def _with_warnings(plan: "LaunchPlan", warnings: Sequence[str]) -> "LaunchPlan":
    return replace(plan, warnings=(*plan.warnings, *warnings)) if warnings else plan


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


def _start(
    plan: "LaunchPlan", options: LaunchOptions, environ: Mapping[str, str], command: "Command | None" = None
) -> int:
    from launch.supervise.job import JobOptions
    from launch.supervise.supervisor import run_job
    from lmsrun.render_receipts import render_receipts

    job = JobOptions(
        grace_period_s=options.grace_period,
        output_dir=Path(options.output_dir) if options.output_dir else None,
        tag_output=options.tag_output if command is None else False,
        numa=options.numa,
        receipt_timeout_s=options.receipt_timeout,
        verbose=options.verbose,
        environ=dict(environ),
        command=command,
    )
    return run_job(plan, job, render_receipts)
