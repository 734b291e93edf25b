"""The probe before a job over several hosts: the effects around ``launch.preflight.ask``."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import filterfalse

from launch.backends.backend import Order
from launch.cluster.hosts import HostShare, depends_on_machine
from launch.cluster.job import ClusterJob, forwarded_names, withheld_names
from launch.model.errors import PlanError
from launch.model.text import count_of
from launch.model.topology import Machine
from launch.plan_host.gpu_choice import choose_gpus
from launch.preflight.answer import describe_this_host, read_versions
from launch.preflight.ask import Round, Way, ask_by_launcher, ask_by_ssh, build_worker, new_nonce
from launch.preflight.report import HostReport, pack_answer, parse_answer
from launch.preflight.verdict import Demand, judge_hosts, render_table
from lmsrun.cluster_run import new_files_dir, written_files
from lmsrun.place import Place, is_here
from lmsrun.resolve import ResolvedJob

ASSUMED = "hosts are assumed to be like this one"
DISCOVERED = (
    "the hosts are those that --host-discovery-script will name; ranks are shown as if all were on this one"
)
_OVERLAP = {"SLURM_OVERLAP": "1"}
"""The probe may share the allocation with a step that is already there; older versions do not know it."""


@dataclass(frozen=True)
class Probed:
    """What the hosts answered. ``troubles`` are the lines of one table; ``warnings`` belong to the plan."""

    machines: Mapping[str, Machine]
    troubles: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    bad_hosts: int = 0


def probe_hosts(resolved: ResolvedJob, place: Place) -> Probed:
    """Ask the hosts what they are like, before anything is started.

    A plan asks only when told to, since it may be for hosts that are elsewhere; so does a dry run whose
    launcher is elsewhere. A job whose ranks all run on this host has nobody to ask, and neither has one
    whose hosts are not known yet.

    Raises:
        UsageError: If a job is to be started by a launcher that cannot do so from here.
    """
    options, is_plan = resolved.options, resolved.is_plan
    installed = place.program is not None
    # A plan may be for a launcher that is elsewhere, a job may not.
    if not options.dry_run:
        place.backend.refuse_obstacle(installed, place.allocation)
    if place.discovered:
        return Probed({}, warnings=(DISCOVERED,))
    if place.only_here or options.topology:
        return _judge_unasked(resolved, place)
    obstacle = place.backend.find_obstacle(installed, place.allocation)
    if options.host_probe is None and options.dry_run and not is_plan and obstacle:
        return _judge_unasked(resolved, place, f"the hosts were not asked, because {obstacle}; {ASSUMED}")
    if not (not is_plan if options.host_probe is None else options.host_probe):
        return _judge_unasked(resolved, place, ASSUMED)
    hosts = _hosts_to_ask(resolved, place)
    answered = _ask(resolved, place, hosts)
    machines = {report.host: report.machine for report in answered.reports if report.machine is not None}
    versions, versions_of = _versions_to_have(answered.reports)
    demand = _build_demand(resolved.answered(machines, ()), place)
    verdict = judge_hosts(answered.reports, versions, versions_of, demand)
    troubles = render_table(verdict.troubles)
    bad = {host for host, _ in verdict.troubles}
    if answered.mpi_trouble:
        troubles.append(f"MPI does not connect the hosts: {answered.mpi_trouble}")
        bad = set(hosts)
    return Probed(machines, tuple(troubles), verdict.warnings, len(bad))


def _judge_unasked(resolved: ResolvedJob, place: Place, assumed: str = "") -> Probed:
    """Compare the job with hosts that nobody asks; ``assumed`` says so where what they are like is a guess.

    Too many ranks for a guess are a warning alone.

    Raises:
        PlanError: If the ranks do not fit, or a GPU that the options name is not there.
    """
    options = resolved.options
    shares = resolved.deal(place, options.oversubscribe)
    demand = replace(_build_demand(resolved, place), allotted_gpus={})
    demand.gpus_of(resolved.machine)
    if assumed or options.host_probe is False:  # it is to be tried anyway
        demand = replace(demand, in_allocation=True)
    verdict = judge_hosts([HostReport(share.host, resolved.machine) for share in shares], {}, "", demand)
    warnings = (assumed, *verdict.warnings) if assumed else verdict.warnings
    troubles = tuple(render_table(verdict.troubles))
    return Probed({}, troubles, warnings, len({host for host, _ in verdict.troubles}))


def refuse_troubles(probed: Probed, hosts: int) -> None:
    """End here when the job cannot run as asked.

    Raises:
        PlanError: If a host cannot be used.
    """
    if probed.troubles:
        raise PlanError(
            f"{probed.bad_hosts} of {count_of(hosts, 'host')} cannot be used; nothing was started "
            "(--no-host-probe tries anyway)"
        )


def _hosts_to_ask(resolved: ResolvedJob, place: Place) -> tuple[str, ...]:
    """Choose the hosts that get ranks; all of them while the slots of some are for the machines to tell."""
    if any(map(depends_on_machine, place.hosts)):
        return tuple(host.name for host in place.hosts)
    return tuple(share.host for share in resolved.deal(place, resolved.options.oversubscribe))


def _versions_to_have(reports: Sequence[HostReport]) -> tuple[dict[str, str | None], str]:
    """Those of this host, or of the first that answered when no rank runs here."""
    here = read_versions()
    first = next((report for report in reports if report.trouble is None), None)
    if first is None or any(is_here(report.host) for report in reports):
        return here, "this host"
    return {**first.versions, "lmsrun": here["lmsrun"]}, first.host


def _build_demand(resolved: ResolvedJob, place: Place) -> Demand:
    options, allocation = resolved.options, place.allocation
    gpus = zip(allocation.hosts, allocation.gpus_per_host, strict=True) if allocation is not None else ()
    return Demand(
        gpus_of=lambda machine: choose_gpus(machine, options.gpus, resolved.request.variables).gpus,
        # What does not fit is told host by host.
        ranks={share.host: share.ranks for share in resolved.deal(place, oversubscribe=True)},
        oversubscribe=options.oversubscribe,
        in_allocation=allocation is not None,
        allotted_gpus={host.name: count for host, count in gpus if count is not None},
        needs_own_name=place.backend.needs_own_name(options),
    )


def _ask(resolved: ResolvedJob, place: Place, hosts: Sequence[str]) -> Round:
    backend, environ, timeout_s = place.backend, resolved.environ, resolved.options.probe_timeout
    way: Way = "mpi" if backend.connects_probe() else "lines"
    nonce = new_nonce()
    command = None
    if place.program is not None and resolved.may_ask_mpirun:
        order = Order(
            program=place.program,
            is_here=True,
            only_here=place.only_here,
            settings=resolved.options,
            job=_build_job(resolved, hosts, build_worker(nonce, timeout_s, way)),
            ranks=(),
            environ=environ,
            dry=resolved.is_plan,
            files_dir=new_files_dir(environ),
        )
        command = backend.build_probe(order)
    if command is None:
        return Round(_ask_by_ssh(hosts, environ, timeout_s))
    inherited = {key: value for key, value in environ.items() if key not in command.unset}
    with written_files(command):
        answered = ask_by_launcher(
            command.argv, {**inherited, **_OVERLAP, **command.env}, hosts, nonce, timeout_s, way
        )
    over_ssh = backend.takes_ssh and place.allocation is None
    return _ask_again(answered, environ, timeout_s) if over_ssh else answered


def _ask_again(answered: Round, environ: Mapping[str, str], timeout_s: float) -> Round:
    """Where mpirun went over ssh and failed as a whole, ssh itself can tell for which host."""
    silent = [report.host for report in answered.reports if report.trouble is not None]
    if not silent:
        return answered
    by_ssh = {report.host: report for report in _ask_by_ssh(silent, environ, timeout_s)}
    if all(report.trouble is None for report in by_ssh.values()):
        return answered
    return replace(answered, reports=tuple(by_ssh.get(each.host, each) for each in answered.reports))


def _ask_by_ssh(hosts: Sequence[str], environ: Mapping[str, str], timeout_s: float) -> tuple[HostReport, ...]:
    """Ask other hosts by ssh; this host needs none to answer."""
    reports = {report.host: report for report in ask_by_ssh([*filterfalse(is_here, hosts)], timeout_s)}
    return tuple(reports.get(host) or _ask_here(host, environ) for host in hosts)


def _ask_here(host: str, environ: Mapping[str, str]) -> HostReport:
    return parse_answer(host, pack_answer(describe_this_host(environ)))


def _build_job(resolved: ResolvedJob, hosts: Sequence[str], worker: tuple[str, ...]) -> ClusterJob:
    """One process a host, with the environment that the job's ranks will have."""
    return ClusterJob(
        shares=tuple(HostShare(host, rank, 1) for rank, host in enumerate(hosts)),
        worker=worker,
        forward=forwarded_names(resolved.environ, resolved.asked),
        withhold=withheld_names(resolved.environ, resolved.asked),
        allow_root=resolved.options.allow_run_as_root,
        whole_lines=True,
    )
