"""What a rank that another launcher started plans for itself, on its own machine."""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace

from launch.discover import read_machine
from launch.installed.binding_tools import choose_tools
from launch.model.busy import BUSY, Busy, parse_busy
from launch.model.errors import JobError, PlanError, UsageError
from launch.model.idset import format_ids, parse_ids
from launch.model.lms_settings import read_lms_config
from launch.model.plan import SHIM, RankPlan
from launch.model.settings import QUIET, PlanSettings, declared_options, parse_switch
from launch.plan_host.planner import HostRequest, plan_host
from launch.rank.identity import LAUNCHERS_MARKS, RankIdentity, read_rank, read_slurm_cpus
from launch.system.process_tree import find_launcher

_ORIGINS = {name: option.env_name for name, option in declared_options(PlanSettings).items()}
"""A rank knows its options by their variables only."""
_THREADS_OF_HOROVOD = "HOROVOD_THREAD_AFFINITY"


def plan_this_rank(command: Sequence[str], environ: Mapping[str, str]) -> RankPlan:
    """Plan the ranks of this host and return this one.

    Every rank of the host computes the same plan and takes its own part, so none has to ask another.

    Raises:
        LmsrunError: If the rank cannot be told, the machine cannot be read, or the ranks do not fit on it.
    """
    identity = read_rank(environ)
    _share_mask(identity, environ)
    # How many ranks a host takes was decided by whoever started them: too late to refuse.
    settings = replace(PlanSettings.from_env(environ), oversubscribe=True)
    machine = read_machine()
    request = HostRequest(
        program=tuple(command),
        local_world_size=identity.local_world_size,
        world_size=identity.world_size,
        first_rank=identity.rank - identity.local_rank,
        host=os.uname().nodename,
        settings=settings,
        lms=read_lms_config(settings, environ),
        tools=choose_tools(machine, settings, environ.get("PATH")),
        environ=environ,
        busy=parse_busy(environ[BUSY]) if environ.get(BUSY) else Busy(),
    )
    try:
        planned = plan_host(machine, request)
    except PlanError as error:
        raise error.named_by(_ORIGINS) from None
    if identity.local_rank == 0 and not _is_quiet(environ):
        for warning in planned.warnings:
            sys.stderr.write(f"lmsrun: {warning}\n")
    rank = planned.ranks[identity.local_rank]
    more = {
        **_meeting_place(identity, environ),
        **_tf_cluster(identity, settings, environ),
        **_for_moves(environ),
        **_for_output(environ),
    }
    # Horovod wants one CPU for each rank of the host, and neighbours of an elastic job come and go.
    left_out = {_THREADS_OF_HOROVOD} if environ.get("HOROVOD_ELASTIC") else set()
    return replace(
        rank, env={name: value for name, value in {**rank.env, **more}.items() if name not in left_out}
    )


def _is_quiet(environ: Mapping[str, str]) -> bool:
    """Say whether the user wants no warnings."""
    try:
        return parse_switch(environ.get(QUIET) or "off")
    except ValueError as error:
        raise UsageError(f"{QUIET} is {environ[QUIET]!r}; needed {error}") from None


def plan_again(environ: Mapping[str, str]) -> str:
    """``LMSRUN_EXPECT`` of a rank whose place has changed, as if it were started there now.

    Args:
        environ: The rank's, with its new place in Horovod's variables.

    Raises:
        LmsrunError: As ``plan_this_rank``, and if nobody wrote down the CPUs of this host's ranks.
    """
    try:
        cpus = parse_ids(json.loads(environ.get("LMSRUN_REPLAN", ""))["cpus"])
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"LMSRUN_REPLAN is missing or damaged ({error}); leave it to lmsrun to set it"
        ) from error
    os.sched_setaffinity(0, cpus)
    return plan_this_rank(("true",), environ).env["LMSRUN_EXPECT"]


def _for_output(environ: Mapping[str, str]) -> dict[str, str]:
    """Where this rank's output is kept, and that Python hands it over in whole lines, as to a terminal."""
    folder = environ.get("LMSRUN_OUTPUT_DIR")
    return {"LMSRUN_RANK_OUTPUT": os.path.abspath(folder), "LMSRUN_LINE_BUFFERED": "1"} if folder else {}


def _for_moves(environ: Mapping[str, str]) -> dict[str, str]:
    """Build what a rank of an elastic job needs to be bound anew: the planner, and the whole host's CPUs."""
    if not environ.get("HOROVOD_ELASTIC"):
        return {}
    told = {
        "ask": [sys.executable, str(SHIM), "plan-rank"],
        "cpus": format_ids(os.sched_getaffinity(0)),
    }
    return {"LMSRUN_REPLAN": json.dumps(told)}


def _meeting_place(identity: RankIdentity, environ: Mapping[str, str]) -> dict[str, str]:
    """Horovod's Gloo contract, where the launcher of a one-host job has opened a rendezvous for it."""
    port = environ.get("LMSRUN_RENDEZVOUS_PORT", "")
    if not port.isdigit():
        return {}
    from launch.supervise.rendezvous import Slot, gloo_env

    host, rank, size = os.uname().nodename, identity.rank, identity.world_size
    return gloo_env(Slot(host, rank, identity.local_rank, 0, size, identity.local_world_size, 1), int(port))


def _tf_cluster(identity: RankIdentity, settings: PlanSettings, environ: Mapping[str, str]) -> dict[str, str]:
    """Where ``tf.distribute`` finds the workers of this job, whoever started them."""
    if settings.framework != "tensorflow":
        return {}
    from launch.model.tf_cluster import build_tf_env, name_workers, read_hosts
    from launch.system.ports import is_port_free

    if settings.tf_port is None:
        raise UsageError(
            "LMSRUN_FRAMEWORK=tensorflow without LMSRUN_TF_PORT; needed one port for all ranks, the first of "
            "those on each host, for ranks that nobody tells cannot agree on one"
        )
    shares = read_hosts(environ, identity.local_world_size, identity.world_size)
    workers = name_workers(shares, settings.tf_port)
    port = settings.tf_port + identity.local_rank
    if not workers[identity.rank].endswith(f":{port}"):
        raise UsageError(
            f"rank {identity.rank} is number {identity.local_rank} on its host, but has the address "
            f"{workers[identity.rank]}; needed ranks host by host, as LMSRUN_TF_HOSTS names them"
        )
    if not is_port_free(port):
        raise JobError(f"port {port} of {os.uname().nodename} is taken; start again, or choose a --tf-port")
    return build_tf_env(workers, identity.rank)


def _share_mask(identity: RankIdentity, environ: Mapping[str, str]) -> None:
    """Take the CPU mask of all ranks of this host where the launcher has bound each on its own account.

    Open MPI binds to a core for two ranks or fewer: planned within that mask, two ranks would share one
    core's halves. Its daemon still has what the job may use; Slurm says it in a variable.
    """
    try:
        if identity.affinity == "parent":
            os.sched_setaffinity(0, os.sched_getaffinity(find_launcher(LAUNCHERS_MARKS, environ)))
        elif identity.affinity == "slurm" and (cpus := read_slurm_cpus(environ)):
            # The cpuset of the step stays the limit: the kernel takes what of the set lies in it.
            os.sched_setaffinity(0, cpus)
    except OSError as error:
        sys.stderr.write(
            f"lmsrun: the CPUs of all ranks under {identity.launcher} could not be taken ({error}); "
            "using this rank's\n"
        )
