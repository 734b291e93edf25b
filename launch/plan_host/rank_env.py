"""The variables that lmsrun adds to a rank's environment, as far as a plan knows them.

Ports and the job's id come at the start, from the supervisor.
"""

import json
from collections.abc import Mapping, Sequence

from launch.model.errors import UsageError
from launch.model.idset import format_ids
from launch.model.rank_variables import RESERVED
from launch.model.settings import OmpPlaces, PlanSettings
from launch.model.topology import Machine
from launch.plan_host.binding import Binding
from launch.plan_host.gpu_choice import GpuChoice
from launch.plan_host.host_memory import RankMemory
from launch.plan_host.placement import Placement
from lms.config import LMSConfig

HOST_LIMIT_VARIABLES = ("TF_GPU_HOST_MEM_LIMIT_IN_MB", "TF_CUDA_HOST_MEM_LIMIT_IN_MB")
"""TensorFlow from 1.14 on, and before; both mean MiB."""
LIMIT_VARIABLES = (*HOST_LIMIT_VARIABLES, "LMS_HOST_MEM_LIMIT_MB")


def parse_forward(
    items: Sequence[str], environ: Mapping[str, str], origin: str = "-x"
) -> tuple[dict[str, str], tuple[str, ...], list[str]]:
    """Sort ``-x`` items.

    Args:
        items: ``NAME`` (hand on the caller's value) or ``NAME=VALUE``.
        environ: The caller's, to notice names that it does not have.
        origin: How the user named the option, for messages.

    Returns:
        The values given, the names to hand on (their values stay out of every plan), and warnings.

    Raises:
        UsageError: If an item has no proper name, or names what lmsrun itself must set.
    """
    given: dict[str, str] = {}
    names, warnings = [], []
    for item in items:
        name, equals, value = item.partition("=")
        if not name.isidentifier() or not name.isascii():
            shown = name + "=***" * bool(equals)  # The value may be a secret.
            raise UsageError(f"{origin} is {shown!r}; needed NAME or NAME=VALUE")
        if name in RESERVED:
            raise UsageError(f"{origin} {name}: lmsrun sets {name} for each rank itself; leave it out")
        if equals:
            given[name] = value
        elif name in environ:
            names.append(name)
        else:
            warnings.append(f"{origin} {name}: {name} is not set here, so it is not handed on")
    return given, tuple(names), warnings


def build_lms_env(config: LMSConfig) -> dict[str, str]:
    """Build the config's variables; ``LMS_ENABLED`` always is one, so that an inherited one cannot win."""
    return {"LMS_ENABLED": "0", **config.to_env()}


def build_shared_env(settings: PlanSettings, choice: GpuChoice) -> dict[str, str]:
    """Build the variables that every rank of a host gets alike."""
    env = dict(choice.env)
    if choice.gpus:
        env["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
        # The very tokens of the visibility variable, where there is one: the worker looks its own up there.
        env["LMSRUN_GPUS"] = choice.tokens
    elif settings.gpus == "none":
        env["LMSRUN_GPUS"] = ""
    if settings.python:
        env["LMSRUN_PYTHON"] = settings.python
    return env


def build_memory_env(memory: RankMemory) -> dict[str, str]:
    """Build the host memory limit's variables, under every name that some TensorFlow or our worker reads."""
    if memory.limit_mb is None:
        return {}
    return dict.fromkeys(LIMIT_VARIABLES, str(memory.limit_mb))


def list_thread_cpus(placements: Sequence[Placement]) -> str:
    """List one CPU a local rank, for Horovod's background threads; empty where not every rank has one."""
    if not all(placement.cpus for placement in placements):
        return ""
    # The last core of each run: libraries put their main thread on the first.
    return ",".join(str(max(placement.cpus)) for placement in placements)


def build_thread_env(
    placement: Placement, thread_cpus: str, environ: Mapping[str, str], most: int | None = None
) -> dict[str, str]:
    """Thread counts that follow the rank's cores; what the user has set stays.

    Args:
        placement: The rank's.
        thread_cpus: From ``list_thread_cpus``; empty: Horovod's background threads are not pinned.
        environ: The user's variables.
        most: The threads of a rank for which there is time.
    """
    cores = placement.cores if most is None else min(placement.cores, most)
    env = {
        "OMP_NUM_THREADS": str(cores),
        "TF_NUM_INTRAOP_THREADS": str(cores),
        # Two at least: a waiting collective or a copy must not keep the compute ops from starting.
        "TF_NUM_INTEROP_THREADS": str(max(2, cores)),
    }
    if thread_cpus:
        env["HOROVOD_THREAD_AFFINITY"] = thread_cpus
    return {name: value for name, value in env.items() if name not in environ}


def build_omp_env(
    placement: Placement, omp_places: OmpPlaces, bound: bool, environ: Mapping[str, str]
) -> dict[str, str]:
    """Where OpenMP's threads go, if that was asked for: the rank's cores or hardware threads, one place each.

    Never by itself: GNU's OpenMP then binds the thread that loads it to the first place, and every thread
    which that one starts later, TensorFlow's among them, stays there.
    """
    if omp_places == "off" or not bound or not placement.runs:
        return {}
    cores = [sorted(core.cpus) for core in placement.runs]
    places = cores if omp_places == "cores" else [[cpu] for core in cores for cpu in core]
    env = {
        "OMP_PLACES": ",".join(f"{{{','.join(map(str, place))}}}" for place in places),
        "OMP_PROC_BIND": "spread",
        "OMP_NUM_THREADS": str(len(places)),
    }
    return {name: value for name, value in env.items() if name not in environ}


def build_device_env(placement: Placement) -> dict[str, str]:
    """Show a rank its own MIG device alone: CUDA takes one of a process, the first that it is shown."""
    uuid = (placement.gpu.uuid if placement.gpu else None) or ""
    return {"CUDA_VISIBLE_DEVICES": uuid, "LMSRUN_GPUS": uuid} if uuid.startswith("MIG-") else {}


def build_adapter_env(
    machine: Machine, placement: Placement, settings: PlanSettings, environ: Mapping[str, str]
) -> dict[str, str]:
    """Name the adapters near a rank to UCX and NCCL, if that was asked for and there are several.

    Nearest are those below the same PCI bridges as the rank's GPU, else those of its NUMA node.
    """
    if settings.adapter == "off" or len(machine.adapters) < 2:
        return {}
    address = placement.gpu.pci_bus_id if placement.gpu else ""
    shared = {adapter.name: dict(adapter.near_gpus).get(address, 0) for adapter in machine.adapters}
    most = max(shared.values())
    names = (
        [name for name, count in shared.items() if count == most]
        if most
        else [adapter.name for adapter in machine.adapters if adapter.numa_node in placement.numa_nodes]
    )
    if not names or len(names) == len(machine.adapters):
        return {}
    listed = ",".join(names)
    # The sign has NCCL take these names as a whole: mlx5_1 would mean mlx5_10 too.
    env = {"UCX_NET_DEVICES": listed, "NCCL_IB_HCA": f"={listed}"}
    return {name: value for name, value in env.items() if name not in environ}


def build_rank_env(rank: int, local_rank: int, world_size: int, local_world_size: int) -> dict[str, str]:
    """Who the rank is, for programs without Horovod."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(local_world_size),
    }


def build_expectation(rank: int, host: str, placement: Placement, binding: Binding, numa: str) -> str:
    """``LMSRUN_EXPECT``: what the shim verifies (and, with method libnuma, applies)."""
    gpu = placement.gpu
    return json.dumps(
        {
            "rank": rank,
            "local_rank": placement.local_rank,
            "host": host,
            "gpu": (gpu.address or gpu.uuid) if gpu else None,
            "numa_node": placement.numa_node,
            "cpus": format_ids(binding.cpus),
            "mem_policy": binding.policy,
            "mem_nodes": format_ids(binding.mem_nodes),
            "bind_method": binding.method,
            "numa": numa,
        }
    )
