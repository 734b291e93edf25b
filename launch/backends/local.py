"""The launcher of one host: every rank is a process that lmsrun itself starts."""

from launch.model.plan import LaunchPlan
from launch.model.tf_cluster import name_workers
from launch.model.topology import Machine
from launch.plan_host.planner import HostRequest, plan_host

NAME = "local"


def plan_local_job(machine: Machine, request: HostRequest) -> LaunchPlan:
    """Plan a job on one host, started by lmsrun itself: one command per rank, its binding, shim and program.

    Raises:
        PlanError: If the request cannot be placed on the machine.
        UsageError: If it has more ranks than there are ports from the one that it names.
    """
    if request.settings.framework == "tensorflow" and request.settings.tf_port:
        name_workers([(request.host, request.local_world_size)], request.settings.tf_port)
    host = plan_host(machine, request)
    commands = tuple(rank.argv for rank in host.ranks)
    return LaunchPlan(
        request.world_size,
        NAME,
        host.ranks,
        commands,
        host.warnings,
        frozenset(request.given),
        request.settings.framework,
        request.settings.tf_port,
        request.settings.gpu_memory_bytes,
    )
