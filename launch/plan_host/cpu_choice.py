"""Which CPUs of a machine the job may use at all: ``--smt`` and ``--reserve-cores``."""

from collections import Counter
from dataclasses import replace

from launch.model.errors import PlanError
from launch.model.idset import IdSet
from launch.model.settings import PlanSettings
from launch.model.text import count_of
from launch.model.topology import Machine
from launch.plan_host.placement import allowed_cores


def narrow_machine(machine: Machine, settings: PlanSettings) -> Machine:
    """Leave the job the CPUs that the settings leave it: whole cores for the system first, then threads.

    Reserved are the first cores of the nodes in turn, for the kernel's own work gathers on the first CPUs.

    Raises:
        PlanError: If no core would be left.
    """
    if settings.smt is None and not settings.reserve_cores:
        return machine
    cores = allowed_cores(machine)
    if settings.reserve_cores and settings.reserve_cores >= len(cores):
        raise PlanError(
            f"--reserve-cores {settings.reserve_cores} leaves no core for the job, which may use "
            f"{len(cores)}; reserve fewer, or widen the cpuset"
        )
    turns: Counter[int | None] = Counter()
    order = []
    for core in cores:
        order.append((turns[core.numa_node], min(core.cpus), core))
        turns[core.numa_node] += 1
    left = [core for _, _, core in sorted(order, key=lambda entry: entry[:2])][settings.reserve_cores :]
    cpus = frozenset().union(*(_threads(core.cpus, settings.smt) for core in left))
    return replace(machine, allowed=replace(machine.allowed, cpus=cpus))


def say_narrowed(machine: Machine, settings: PlanSettings) -> list[str]:
    """Say what was asked for and is not there.

    Args:
        machine: As it was read.
        settings: The job's.
    """
    most = max((len(core.cpus) for core in allowed_cores(machine)), default=0)
    if settings.smt is None or settings.smt <= most:
        return []
    return [f"--smt {settings.smt}: cores have {count_of(most, 'hardware thread')} here, and all are used"]


def _threads(cpus: IdSet, smt: int | None) -> IdSet:
    """Choose the first hardware threads of a core, in the kernel's numbering."""
    return frozenset(sorted(cpus)[:smt]) if smt else cpus
