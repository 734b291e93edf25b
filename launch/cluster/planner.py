"""A job over several hosts: every host's part planned by the one planner, and what its launcher is told."""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from launch.cluster.hosts import HostShare
from launch.cluster.job import ClusterJob, escape_args, forwarded_names, withheld_names
from launch.model.cluster_settings import ClusterSettings, settings_env
from launch.model.plan import RankPlan
from launch.model.text import count_of
from launch.model.tf_cluster import HOSTS_VARIABLE, format_hosts, name_workers
from launch.model.topology import Machine
from launch.plan_host.planner import HostPlan, HostRequest, plan_host
from launch.plan_host.rank_env import build_lms_env

_OF_THE_PLAN = ("LMSRUN_EXPECT",)
"""Decided here only to be shown: a rank that another launcher starts decides it again on its own machine."""


_JOB_NAMES = (
    *("LMSRUN_JOB_ID", "LMSRUN_CONTROL", "LMSRUN_LINE_BUFFERED", "MASTER_PORT"),
    "LMSRUN_TF_PORT",
)
"""Set when the job starts."""
_RECEIPT_WAYS = {True: "LMSRUN_RECEIPT_DIR", False: "LMSRUN_RECEIPT_LINES"}
"""The receipts' folder is on this host; from others they come as lines."""


def plan_shares(
    shares: Sequence[HostShare], machine_of: Callable[[str], Machine], request: HostRequest
) -> HostPlan:
    """Plan every host's ranks.

    Hosts that are alike (same machine, as many ranks) are planned once, which keeps thousands cheap.

    Args:
        shares: Which ranks run where.
        machine_of: The machine of a host.
        request: What all hosts share.

    Raises:
        PlanError: If a host cannot take its ranks.
    """
    models: dict[tuple[int, int], HostPlan] = {}
    ranks: list[RankPlan] = []
    hosts_of: dict[str, list[str]] = {}
    for share in shares:
        machine = machine_of(share.host)
        key = (id(machine), share.ranks)
        if key not in models:
            models[key] = plan_host(machine, _request_of(share, request))
        for warning in models[key].warnings:
            hosts_of.setdefault(warning, []).append(share.host)
        ranks += _stamp(models[key].ranks, share)
    warnings = (_say(warning, hosts, len(shares)) for warning, hosts in hosts_of.items())
    return HostPlan(tuple(ranks), tuple(warnings))


def build_job(
    shares: Sequence[HostShare],
    settings: ClusterSettings,
    request: HostRequest,
    inherited: Mapping[str, str],
    asked: Sequence[str],
    only_here: bool,
    tag_output: bool | None,
) -> ClusterJob:
    """Build what a launcher is told of a job.

    Args:
        shares: Which ranks run where.
        settings: The user's options.
        request: What all hosts share.
        inherited: The launcher's whole environment, also what the plan must not see.
        asked: Names of variables to hand on (``-x NAME``).
        only_here: Whether all ranks run on this host, which may keep all of its environment.
        tag_output: Whether lines shall name their rank; None: when there are several.
    """
    ranks = sum(share.ranks for share in shares)
    shim, program = _escaped(request.shim, request.program)
    return ClusterJob(
        shares=tuple(shares),
        worker=(*shim, *program),
        env={
            **settings_env(settings),
            **build_lms_env(request.lms),
            **_master(shares, inherited),
            **_tf_hosts(shares, settings),
            **request.given,
        },
        forward=(*forwarded_names(inherited, asked), *_JOB_NAMES, _RECEIPT_WAYS[only_here]),
        withhold=() if only_here else withheld_names(inherited, asked),
        allow_root=settings.allow_run_as_root,
        oversubscribe=settings.oversubscribe,
        tag_output=ranks > 1 if tag_output is None else tag_output,
    )


def _escaped(shim: tuple[str, ...], program: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Escape a program that has an argument ``:``; leave any other as it was typed, for people to read."""
    if ":" not in program:
        return shim, program
    return (*shim[:-1], "--escaped", shim[-1]), escape_args(program)


def _master(shares: Sequence[HostShare], environ: Mapping[str, str]) -> dict[str, str]:
    """Where programs without Horovod meet: on the first host; the user's own choice wins."""
    return {} if environ.get("MASTER_ADDR") or not shares else {"MASTER_ADDR": shares[0].host}


def _tf_hosts(shares: Sequence[HostShare], settings: ClusterSettings) -> dict[str, str]:
    """Where ``tf.distribute`` has its workers; each rank makes ``TF_CONFIG`` of it and of the first port."""
    if settings.framework != "tensorflow":
        return {}
    pairs = [(share.host, share.ranks) for share in shares]
    name_workers(pairs, settings.tf_port or 1)  # Whether the ports reach is told before anything starts.
    return {HOSTS_VARIABLE: format_hosts(pairs, os.uname().nodename)}


def _request_of(share: HostShare, request: HostRequest) -> HostRequest:
    return replace(request, host=share.host, local_world_size=share.ranks, first_rank=share.first_rank)


def _stamp(models: Sequence[RankPlan], share: HostShare) -> list[RankPlan]:
    return [
        replace(
            model,
            rank=share.first_rank + model.local_rank,
            host=share.host,
            env={
                **{name: value for name, value in model.env.items() if name not in _OF_THE_PLAN},
                "RANK": str(share.first_rank + model.local_rank),
            },
        )
        for model in models
    ]


def _say(warning: str, hosts: Sequence[str], of: int) -> str:
    """Name the hosts of a warning, whose numbers of ranks count on each host by itself."""
    if of == 1:
        return warning
    warning = re.sub(r"^(?=ranks? \d)", "local ", warning)
    others = f" and {count_of(len(hosts) - 1, 'other host')}" if len(hosts) > 1 else ""
    return f"each host: {warning}" if len(hosts) == of else f"{hosts[0]}{others}: {warning}"
