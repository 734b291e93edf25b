"""Machine and options to plan: every decision of a launch, in one place and without effects."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from launch.model.busy import Busy
from launch.model.errors import PlanError
from launch.model.plan import SHIM, RankPlan
from launch.model.settings import PlanSettings
from launch.model.text import count_of, name_ids
from launch.model.topology import Machine
from launch.plan_host.binding import Binding, BindingTools, bind_ranks, choose_ladder
from launch.plan_host.cpu_choice import narrow_machine, say_narrowed
from launch.plan_host.gpu_choice import GpuChoice, choose_gpus, pick_gpus
from launch.plan_host.host_memory import RankMemory, plan_host_memory
from launch.plan_host.placement import (
    HostPlacement,
    Placement,
    Seating,
    allowed_cores,
    count_slots,
    place_ranks,
    say_by_rank,
)
from launch.plan_host.rank_env import (
    HOST_LIMIT_VARIABLES,
    build_adapter_env,
    build_device_env,
    build_expectation,
    build_lms_env,
    build_memory_env,
    build_omp_env,
    build_rank_env,
    build_shared_env,
    build_thread_env,
    list_thread_cpus,
)
from lms.config import LMSConfig

MOST_RANKS = 1 << 13
"""More on one host is a typing error; the environment of each lists a CPU of all of them."""


@dataclass(frozen=True)
class HostRequest:
    """The part of a job that one host runs: ranks ``first_rank .. first_rank + local_world_size - 1``.

    ``environ`` is the user's environment, which the plan respects: threads, hidden devices, a memory limit.
    ``given`` are the values of ``-x NAME=VALUE``; they count as if the user had exported them.
    """

    program: tuple[str, ...]
    local_world_size: int
    world_size: int
    first_rank: int = 0
    host: str = "localhost"
    settings: PlanSettings = PlanSettings()
    lms: LMSConfig = LMSConfig()
    tools: BindingTools = BindingTools()
    environ: Mapping[str, str] = field(default_factory=dict)
    given: Mapping[str, str] = field(default_factory=dict)
    busy: Busy = Busy()
    """What runs on the host already."""
    shim: tuple[str, ...] = (sys.executable, str(SHIM), "worker", "--")

    @property
    def variables(self) -> dict[str, str]:
        """Return the user's variables as the ranks have them, which is how every plan reads them."""
        return {**self.environ, **self.given}


@dataclass(frozen=True)
class HostPlan:
    """The ranks of one host, and what a person should know of them."""

    ranks: tuple[RankPlan, ...]
    warnings: tuple[str, ...] = ()


def plan_slots(
    machine: Machine, settings: PlanSettings, environ: Mapping[str, str], counted: int | None = None
) -> int:
    """How many ranks the machine takes without oversubscription.

    Args:
        machine: Of the host.
        settings: The user's.
        environ: The variables of the ranks as the user has them.
        counted: The slots that a batch system counts there, be they cores; they are no more than the GPUs.

    Raises:
        PlanError: If a GPU that the settings name does not exist.
    """
    gpus = choose_gpus(machine, settings.gpus, environ).gpus
    if counted is not None:
        return min(counted, len(gpus) or counted)
    return count_slots(narrow_machine(machine, settings), gpus)


def plan_free_slots(
    machine: Machine, settings: PlanSettings, environ: Mapping[str, str], busy: Busy
) -> tuple[int, tuple[str, ...]]:
    """How many ranks ``-np auto`` gives: those for which something is free, or all where nothing is.

    Returns:
        The number, and what a person should know of it.

    Raises:
        PlanError: As ``plan_slots``.
    """
    narrowed = narrow_machine(machine, settings)
    gpus = choose_gpus(machine, settings.gpus, environ).gpus
    slots = count_slots(narrowed, gpus)
    if gpus:
        free = sum(not busy.has_gpu(gpu) for gpu in gpus)
    else:
        free = sum(not core.cpus & busy.cpus for core in allowed_cores(narrowed))
    time = None if gpus else machine.cpus_of_time
    if time is not None and time < (free or slots):
        said = (
            f"the cgroup gives the time of {count_of(time, 'CPU')}, of {slots} cores: -np auto is {time} here"
        )
        return time, (said,)
    if not 0 < free < slots:
        return slots, ()
    what = "GPUs" if gpus else "cores"
    return free, (f"{slots - free} of {slots} {what} are in use: -np auto is {free} here",)


def plan_host(machine: Machine, request: HostRequest) -> HostPlan:
    """Place, size and bind the ranks of one host.

    Raises:
        PlanError: If the request cannot be placed on the machine.
    """
    settings, limit_said = _effective_settings(request)
    said = [*limit_said, *say_narrowed(machine, settings)]
    machine = narrow_machine(machine, settings)
    choice = choose_gpus(machine, settings.gpus, request.variables)
    _check_slots(machine, choice, request, settings)
    choice, place_said = pick_gpus(choice, request.local_world_size, settings.place, request.busy.has_gpu)
    ladder = choose_ladder(settings, request.tools)
    seating = Seating(settings.place, settings.span, request.busy.cpus)
    placed = place_ranks(machine, choice.gpus, request.local_world_size, seating)
    # Ranks that nothing binds may take memory anywhere, so they are sized against the whole host.
    seats = placed.ranks if ladder.method != "none" else tuple(map(_unbound, placed.ranks))
    memory = plan_host_memory(machine, seats, settings)
    bindings, steps_down = bind_ranks(ladder, settings, seats, memory.ranks)
    thread_cpus = list_thread_cpus(seats)
    ranks = tuple(
        _build_rank(machine, request, settings, choice, thread_cpus, each)
        for each in zip(placed.ranks, memory.ranks, bindings, strict=True)
    )
    shared = say_shared(request.busy, ranks)
    said += _say_little_time(machine, placed.ranks)
    if settings.omp_places != "off" and not all(binding.cpus for binding in bindings):
        said.append(f"--omp-places {settings.omp_places} has no effect: ranks are not bound to CPUs")
    warnings = (*machine.warnings, *choice.warnings, *_relevant(placed, ladder.method), *said, *place_said)
    return HostPlan(ranks, (*warnings, *memory.warnings, *steps_down, *shared))


def _threads_with_time(machine: Machine, ranks: int) -> int | None:
    """Return how many threads each rank of a host has time for; None where nothing limits it."""
    cpus = machine.cpus_of_time
    return None if cpus is None else max(1, cpus // max(1, ranks))


def _say_little_time(machine: Machine, ranks: Sequence[Placement]) -> list[str]:
    most, cores = _threads_with_time(machine, len(ranks)), max((rank.cores for rank in ranks), default=0)
    if most is None or most >= cores:
        return []
    time, each = count_of(machine.cpus_of_time or 1, "CPU"), count_of(most, "thread")
    return [f"the cgroup gives this job the time of {time}: a rank computes with {each}, not {cores}"]


def say_shared(busy: Busy, ranks: Sequence[RankPlan]) -> list[str]:
    """Say which ranks share a GPU or CPUs with somebody, and with whom."""
    said: list[tuple[int, str | None]] = []
    for rank in ranks:
        whose = busy.tell_gpu(rank.gpu) if rank.gpu else ""
        said.append((rank.local_rank, f"its GPU is shared with {whose}" if whose else None))
    for rank in ranks:
        said += [
            (
                rank.local_rank,
                f"{name_ids('CPU', cpus)} {'is' if cpus.isdigit() else 'are'} shared with {name}",
            )
            for name, cpus in busy.tell_cpus(rank.cpus)
        ]
    return say_by_rank(said)


def _effective_settings(request: HostRequest) -> tuple[PlanSettings, tuple[str, ...]]:
    """Complete the settings with a host memory limit given elsewhere than on the command line."""
    if request.settings.host_mem_limit_mb is not None:
        return request.settings, ()
    if request.lms.host_mem_limit_mb is not None:
        return replace(request.settings, host_mem_limit_mb=request.lms.host_mem_limit_mb), ()
    variables = request.variables
    for name in HOST_LIMIT_VARIABLES:
        text = variables.get(name, "")
        if text.isascii() and text.isdigit() and 0 < int(text[:12]):
            said = f"the host memory limit of {text} MiB comes from {name}"
            return replace(request.settings, host_mem_limit_mb=int(text[:12])), (said,)
        if text.strip():
            said = f"{name} is {text[:20]!r}, and no number of MiB; ranks get the limit of the plan instead"
            return request.settings, (said,)
    return request.settings, ()


def _check_slots(machine: Machine, choice: GpuChoice, request: HostRequest, settings: PlanSettings) -> None:
    slots, ranks = count_slots(machine, choice.gpus), request.local_world_size
    what = "GPU" if choice.gpus else "usable core"
    if slots == 0:
        raise PlanError(f"{request.host} has no CPU that this job may use; check its cpuset and affinity")
    if ranks > slots and not settings.oversubscribe:
        why = f" ({choice.warnings[0]})" if choice.warnings else ""
        raise PlanError(
            f"{ranks} ranks do not fit on {request.host} with {count_of(slots, what)}{why}; "
            f"try -np {slots}, or --oversubscribe"
        )
    if ranks > MOST_RANKS:
        raise PlanError(
            f"{ranks} ranks are to run on {request.host}, needed at most {MOST_RANKS} a host; "
            "try more hosts (-H)"
        )


def _unbound(placement: Placement) -> Placement:
    return replace(placement, cpus=frozenset())


def _relevant(placed: HostPlacement, method: str) -> tuple[str, ...]:
    return placed.warnings if method != "none" else ()


def _build_rank(
    machine: Machine,
    request: HostRequest,
    settings: PlanSettings,
    choice: GpuChoice,
    thread_cpus: str,
    decided: tuple[Placement, RankMemory, Binding],
) -> RankPlan:
    placement, memory, binding = decided
    rank = request.first_rank + placement.local_rank
    users = request.variables
    env = {
        **request.given,
        **build_rank_env(rank, placement.local_rank, request.world_size, request.local_world_size),
        **build_shared_env(settings, choice),
        **build_device_env(placement),
        **build_lms_env(request.lms),
        **build_memory_env(memory),
        **build_thread_env(
            placement,
            thread_cpus if binding.cpus else "",
            users,
            _threads_with_time(machine, request.local_world_size),
        ),
        **build_adapter_env(machine, placement, settings, users),
        **build_omp_env(placement, settings.omp_places, bool(binding.cpus), users),
        "LMSRUN_EXPECT": build_expectation(rank, request.host, placement, binding, settings.numa),
    }
    return RankPlan(
        rank=rank,
        local_rank=placement.local_rank,
        host=request.host,
        gpu=placement.gpu,
        numa_node=placement.numa_node,
        cpus=binding.cpus,
        mem_policy=binding.policy,
        mem_nodes=binding.mem_nodes,
        host_mem_limit_mb=memory.limit_mb,
        env=env,
        argv=(*binding.argv, *request.shim, *request.program),
    )
