"""What is decided of a job before anything starts: one frozen value, made once.

Only what a job on this host needs is imported at once: the time to the first rank is a promise.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from launch.discover import read_machine
from launch.installed.binding_tools import assume_tools, choose_tools
from launch.installed.framework import FrameworkChoice, choose_framework, read_script
from launch.model.cluster_settings import ROOT_CONSENT, find_unread, has_allocation
from launch.model.errors import UsageError
from launch.model.lms_settings import read_lms_config
from launch.model.plan import MODULE
from launch.model.topology import Machine
from launch.plan_host.planner import HostRequest, plan_slots
from launch.plan_host.rank_env import parse_forward
from lms.config import doubtful_variables
from lmsrun.file_checks import (
    check_lms_places,
    check_named_files,
    check_program,
    check_timeline,
    doubt_job,
)
from lmsrun.options import LaunchOptions
from lmsrun.sources.request import Request

if TYPE_CHECKING:
    from launch.cluster.hosts import HostShare
    from lmsrun.place import Place


@dataclass(frozen=True)
class ResolvedJob:
    """A job as it will be planned; ``answered`` replaces it when its hosts have told what they are like."""

    options: LaunchOptions
    environ: Mapping[str, str]
    """The user's whole environment, which a launcher inherits."""
    place: "Place | None"
    """None: on this host, started by lmsrun itself."""
    machine: Machine
    """This host, or what ``--topology`` names."""
    request: HostRequest
    """What all hosts share."""
    asked: tuple[str, ...] = ()
    """Names of variables to hand on (``-x NAME``)."""
    warnings: tuple[str, ...] = ()
    is_plan: bool = False
    """Whether the command is ``lmsrun plan``, which asks hosts only when told to."""
    may_ask_mpirun: bool = True
    """Whether mpirun may be started to say what it is: for a plan, not one that a file names."""
    machines: Mapping[str, Machine] = field(default_factory=dict)
    """Those of hosts that have answered."""
    framework: FrameworkChoice = FrameworkChoice("horovod", "as asked", "init")
    """How its ranks find each other."""
    record_dir: str = ""
    """Where its ranks leave reports: its run folder, or one until the page is written; empty: nowhere."""

    def machine_of(self, host: str) -> Machine:
        """Give a host's machine; one that has not answered is taken to be like this one."""
        return self.machines.get(host, self.machine)

    def slots_of(self, host: str, counted: int | None = None) -> int:
        """Count the ranks that a host's machine takes, of those that a batch system ``counted`` there.

        Raises:
            PlanError: If a GPU that the options name does not exist there.
        """
        return plan_slots(self.machine_of(host), self.options, self.request.variables, counted)

    def deal(self, place: "Place", oversubscribe: bool) -> "tuple[HostShare, ...]":
        """Deal the ranks to the hosts, by the slots that somebody gave them or that their machines have.

        Raises:
            PlanError: If there are more ranks than slots.
        """
        from launch.cluster.hosts import resolve_slots, share_ranks

        hosts = resolve_slots(place.hosts, lambda host: self.slots_of(host.name, host.slots))
        return share_ranks(hosts, self.options.num_proc, oversubscribe)

    def answered(self, machines: Mapping[str, Machine], warnings: tuple[str, ...]) -> "ResolvedJob":
        """Return the same job, now that its hosts are known."""
        return replace(self, machines=machines, warnings=(*warnings, *self.warnings))


def resolve_job(request: Request, environ: Mapping[str, str], is_plan: bool) -> ResolvedJob:
    """Decide where a job runs and what its planner is asked, and look whether what it names is here.

    Raises:
        LmsrunError: If the request cannot be met.
    """
    check_named_files(request, environ)
    options = request.options
    place = _find_place(options, environ)
    given, asked, unset = parse_forward(options.forward, environ, request.origins.get("forward", "-x"))
    variables = {**environ, **given}
    framework = choose_framework(options.framework, request.program, variables, options.python)
    _refuse_elastic(framework, options)
    is_root_welcome = options.allow_run_as_root or (
        "allow_run_as_root" not in request.origins and all(environ.get(name) == "1" for name in ROOT_CONSENT)
    )
    options = replace(options, framework=framework.name, allow_run_as_root=is_root_welcome)
    only_here = place is None or place.only_here
    check_program(request.program, options.dry_run or not only_here, environ, options.python)
    if only_here and not options.dry_run:
        check_timeline(request)
    machine = read_machine(options.topology)
    unread = _doubt_unread(request, "local" if place is None else place.choice.name)
    is_live = not options.topology
    # A plan of a saved machine is for another one; a job that starts here is for this one, saved or not.
    is_for_here = only_here and (is_live or not is_plan)
    lms = read_lms_config(options, variables, request.lms_table, request.lms_files)
    if only_here and not options.dry_run:
        check_lms_places(lms)
    host_request = HostRequest(
        program=request.program,
        local_world_size=1,
        world_size=1,
        settings=options,
        lms=lms,
        tools=choose_tools(machine, options) if is_live else assume_tools(machine),
        environ=environ if is_for_here else portable_environ(environ, asked),
        given=given,
    )
    may_ask = not (options.dry_run and "mpirun" in request.from_files)
    untold = () if may_ask or place is None or place.program is None else (_said_of_mpirun(request),)
    doubted = doubt_job(request.program, lms, environ) if options.dry_run and only_here and is_live else ()
    warnings = (
        *unread,
        *unset,
        *doubt_behind(request.behind, request.program),
        *doubtful_variables(variables),
        *framework.warnings,
        *untold,
        *doubted,
    )
    job = ResolvedJob(
        options,
        environ,
        place,
        machine,
        host_request,
        asked,
        warnings,
        is_plan,
        may_ask,
        framework=framework,
    )
    if place is None or not place.is_local:
        return job
    ranks = sum(share.ranks for share in job.deal(place, options.oversubscribe))
    return replace(job, place=None, options=replace(options, num_proc=ranks))


def doubt_behind(behind: Sequence[str], command: Sequence[str]) -> tuple[str, ...]:
    """Warn of options for lmsrun behind the program, unless the script names them as its own.

    Args:
        behind: The options, each as it was typed.
        command: The program with its arguments.
    """
    if not behind:
        return ()
    script = read_script(command)
    found = [typed for typed in behind if script and not _names(script, re.split("[ =]", typed)[0])]
    if not found:
        return ()
    program = " ".join(command[: 2 if command[0] == MODULE else 1])
    stand, go, them = ("stands", "goes", "it") if len(found) == 1 else ("stand", "go", "them")
    said = f"{', '.join(found)} {stand} behind {program} and {go} to it"
    return (f"{said}; for lmsrun put {them} in front",)


def _names(script: bytes, flag: str) -> bool:
    """Whether a script names an option: as it is typed, or as the name that option parsers make of it."""
    name = re.escape(flag.lstrip("-")).replace("\\-", "[-_]")
    own = rf"\b{name}\b" if flag.startswith("--") else rf"[\"']{re.escape(flag)}[\"']"
    return re.search(own.encode(), script) is not None


def _said_of_mpirun(request: Request) -> str:
    return (
        f"{request.origins['mpirun']} {request.options.mpirun} is not started for a plan, so that its "
        "kind is not known and Open MPI's options are shown; give --mpirun to have it asked"
    )


def portable_environ(environ: Mapping[str, str], asked: Sequence[str] = ()) -> dict[str, str]:
    """Keep what holds for another machine of the environment: not what is hidden from CUDA here.

    Args:
        environ: The user's.
        asked: Names that are handed on, whatever they are.
    """
    return {
        name: value
        for name, value in environ.items()
        if name in asked or not name.endswith("_VISIBLE_DEVICES")
    }


def _find_place(options: LaunchOptions, environ: Mapping[str, str]) -> "Place | None":
    """Find where the job runs; None: on this host, started by lmsrun itself, by the machine's own slots."""
    asked = (
        options.hosts or options.hostfile or options.host_discovery_script or options.min_np or options.max_np
    )
    allocated = options.launcher == "auto" and has_allocation(environ)
    if options.launcher in ("auto", "local") and not asked and not allocated:
        return None
    from lmsrun.place import find_place

    place = find_place(options, environ)
    return None if place.is_local and any(host.slots is None for host in place.hosts) else place


def _refuse_elastic(framework: FrameworkChoice, options: LaunchOptions) -> None:
    """Refuse ranks that come and go where every rank has to know all others from the start.

    Raises:
        UsageError: With what to try.
    """
    if framework.name == "tensorflow" and (options.min_np or options.max_np or options.host_discovery_script):
        raise UsageError(
            f"elastic ranks need Horovod, but the framework is tensorflow ({framework.why}); "
            "try --framework horovod, or leave --min-np, --max-np and --host-discovery-script out"
        )


def _doubt_unread(request: Request, launcher: str) -> list[str]:
    """Warn of options that were typed and mean nothing to this job; a file serves many jobs."""
    warnings = []
    for name, readers in find_unread(request.origins, launcher).items():
        origin = request.origins[name]
        said = f"{origin} means nothing to the launcher {launcher}, only to {', '.join(readers)}"
        if name == "rankfile_out":
            raise UsageError(f"{said}; try --launcher mpirun, or leave it out")
        if origin.startswith("-"):
            warnings.append(f"{said}; it is left out")
    options, period = request.options, request.origins.get("period", "")
    if period.startswith("-") and not (options.live or options.metrics):
        warnings.append(f"{period} means nothing without --live or --metrics FILE; it is left out")
    return warnings
