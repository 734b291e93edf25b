"""The statistics of IBM's TensorFlow 2.1 and 2.2, as ``tf.experimental.get_*`` had them.

IBM counted inside its own allocator. Here the figures come from the stock allocator and from the engine's
store; what neither counts is an error that says so.
"""

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lms.errors import BuildError, LMSError

if TYPE_CHECKING:
    from lms.device.device import Device
    from lms.transports.base import StoreStats


class NoStatisticError(LMSError):
    """Nothing here counts what was asked for; the text says what comes closest."""


def memory_info(gpu_id: int, what: str) -> tuple[int, int]:
    """Return bytes in use and their peak on a device.

    Raises:
        NoStatisticError: If there is no such device or its allocator does not count.
    """
    device = _counting(gpu_id, what)
    memory = device.memory()
    if memory is None:
        raise _no_count(what, device.name)
    return memory


def _counting(gpu_id: int, what: str) -> "Device":
    """Return the device if its allocator counts; the CPU's usual one sees large allocations at most."""
    device = _device(gpu_id, what)
    if device.type != "GPU" and device.limit_bytes is None:
        raise _no_count(what, device.name)
    return device


def _no_count(what: str, device: str) -> NoStatisticError:
    return NoStatisticError(
        f"{what}: the allocator of {device} does not count; needed a GPU, or "
        "TF_CPU_ALLOCATOR_USE_BFC=true and TF_CPU_BFC_MEM_LIMIT_IN_MB before TensorFlow starts"
    )


def _device(gpu_id: int, what: str) -> "Device":
    """Return the GPU of this number; without GPUs number 0 is the CPU device, which LMS plans for then."""
    import tensorflow as tf

    from lms.device.device import Device, read_devices

    first = read_devices(os.environ)[0]
    gpus = len(tf.config.list_logical_devices("GPU"))
    if not isinstance(gpu_id, int) or not 0 <= gpu_id < max(gpus, 1):
        raise NoStatisticError(
            f"{what}: gpu_id is {gpu_id!r}; this process sees {gpus} GPU(s), numbered from 0 (in a rank "
            "its own GPU is number 0)"
        )
    return first if gpu_id == 0 else Device(f"GPU:{gpu_id}", None)


def bytes_limit(gpu_id: int, what: str) -> int:
    """Return the bytes that TensorFlow may allocate on a device.

    Raises:
        NoStatisticError: If it has no limit of its own.
    """
    device = _device(gpu_id, what)
    if device.limit_bytes is None:
        raise NoStatisticError(f"{what}: {device.name} has no limit that TensorFlow tells")
    return device.limit_bytes


def _of_allocator(field: str) -> Callable[[int, str], int]:
    """Make a function that asks the allocator for ``field``, by a compiled op."""

    def read(gpu_id: int, what: str) -> int:
        from lms.device.allocator_counters import read_allocator

        device = _counting(gpu_id, what)
        try:
            value: int | None = getattr(read_allocator(device.name, os.environ), field)
        except BuildError as error:
            raise NoStatisticError(f"{what}: the op that asks the allocator is missing: {error}") from error
        if value is None:
            raise NoStatisticError(f"{what}: the allocator of {device.name} does not count it")
        return value

    return read


def store_stats(what: str) -> "StoreStats":
    """Return the counts of what has been swapped so far; all zero while nothing has been edited.

    Raises:
        NoStatisticError: If copies are made by TensorFlow itself, which does not count them.
    """
    from lms.transports.base import StoreStats

    transport = _transport()
    if transport is None:
        return StoreStats()
    if transport.name == "device":
        raise NoStatisticError(
            f"{what}: TensorFlow copies between GPU and host itself and does not count; lms.report() has the "
            "plan's bytes a step"
        )
    stats: StoreStats = transport.stats()
    return stats


def _transport() -> Any:
    hook = sys.modules.get("lms.engine.installation")
    try:
        return None if hook is None else hook.engine().resources.active_transport
    except LMSError:
        return None


def _of_store(field: str) -> Callable[[int, str], int]:
    def read(gpu_id: int, what: str) -> int:
        _device(gpu_id, what)
        value: int = getattr(store_stats(what), field)
        return value

    return read


def _never(gpu_id: int, what: str) -> int:
    """Return 0: LMS never sends all idle tensors away at once.

    Swaps are planned, one tensor each.
    """
    _device(gpu_id, what)
    return 0


COUNTED: dict[str, Callable[[int, str], int]] = {
    "bytes_in_use": lambda gpu_id, what: memory_info(gpu_id, what)[0],
    "peak_bytes_in_use": lambda gpu_id, what: memory_info(gpu_id, what)[1],
    "bytes_limit": bytes_limit,
    "bytes_reclaimed": _of_store("bytes_out"),
    "current_bytes_reclaimed": _of_store("bytes_in_use"),
    "peak_bytes_reclaimed": _of_store("peak_bytes"),
    "num_single_reclaims": _of_store("swap_outs"),
    "num_full_reclaims": _never,
    "num_allocs": _of_allocator("num_allocs"),
    "largest_alloc_size": _of_allocator("largest_alloc_size"),
    "bytes_reserved": _of_allocator("pool_bytes"),
    "peak_bytes_reserved": _of_allocator("peak_pool_bytes"),
    "bytes_reservable_limit": bytes_limit,
}
"""Statistics that have a meaning here; called with the GPU's number and the name to use in errors."""

IDLE = "whether an op is reading a tensor right now is known to IBM's allocator alone; see get_bytes_in_use"
MOVED = "IBM's allocator moved tensors together; cuda_malloc_async maps pages instead and counts nothing"

NOT_COUNTED: dict[str, str] = {
    "bytes_inactive": IDLE,
    "bytes_active": IDLE,
    "peak_bytes_active": IDLE,
    "num_defragmentations": MOVED,
    "bytes_defragged": MOVED,
}
"""Statistics that nothing here counts, with what to look at instead."""


def _getter(name: str) -> Callable[[int], int]:
    what = f"get_{name}"

    def get(gpu_id: int = 0) -> int:
        if name in NOT_COUNTED:
            raise NoStatisticError(f"{what}: {NOT_COUNTED[name]}")
        return COUNTED[name](gpu_id, what)

    get.__name__ = get.__qualname__ = what
    return get


def _host_getter(field: str, name: str) -> Callable[[int], int]:
    def get(numa_node: int = 0) -> int:
        if numa_node != 0:
            raise NoStatisticError(
                f"{name}: numa_node is {numa_node!r}; a process has one pool of host memory, number 0, "
                "wherever lmsrun has bound it"
            )
        value: int = getattr(store_stats(name), field)
        return value

    get.__name__ = get.__qualname__ = name
    return get


GETTERS: dict[str, Callable[..., Any]] = {
    **{f"get_{name}": _getter(name) for name in (*COUNTED, *NOT_COUNTED)},
    "get_gpu_host_bytes_in_use": _host_getter("bytes_in_use", "get_gpu_host_bytes_in_use"),
    "get_gpu_host_peak_bytes_in_use": _host_getter("peak_bytes", "get_gpu_host_peak_bytes_in_use"),
}
"""Name to function, for ``tf.experimental``."""
