"""The device whose memory is planned: its limit, the bytes in use on it, and its allocator's counters."""

import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeGuard

import tensorflow as tf
from tensorflow.python.client import device_lib
from tensorflow.python.eager import context
from tensorflow.python.util import _pywrap_util_port

from lms.config import ALLOCATOR, ASYNC_ALLOCATOR
from lms.device.host_memory import is_host_input, is_host_output
from lms.device.kernels import PERSISTENT, Gpu, Kernels, OneDnnCpu, PlainCpu
from lms.native.processor_cache import read_l3_bytes

MIB = 1 << 20
CPU_BFC, CPU_BFC_LIMIT = "TF_CPU_ALLOCATOR_USE_BFC", "TF_CPU_BFC_MEM_LIMIT_IN_MB"
"""With the first true the CPU device gets an allocator with a hard limit, the second in MiB."""

NO_ALGORITHM = "No algorithm worked!"
NO_ROOM = ("RESOURCE_EXHAUSTED", "ALLOC_FAILED", "out of memory", "OOM")
"""In what cuDNN's algorithms say of a failure: there was no scratch memory for them."""

NO_SCRATCH = ("failed to allocate the scratch space", "requires nonzero scratch space")
"""In the message of a convolution whose algorithm, chosen in an earlier step, finds no scratch memory now."""

IN_PYTHON = "errors_impl.ResourceExhaustedError: "
"""Marks the message of a ``py_function`` whose code ran out of memory."""
NO_TENSOR = "OOM when allocating"
"""Marks the message of TensorFlow where the device has no room for a tensor."""
PYTHONS_OWN = "MemoryError: "
"""Marks the message of a ``py_function`` or ``numpy_function`` whose code had no host memory."""
HOST_POOL = "_host_bfc"
"""A part of the allocator's name where the pool of pinned host memory has no room: swaps fill it."""

NO_ROOM_FOR_COPY = "unable to allocate output tensor"
"""In the message of a copy between host and device where one of the two, not said which, is full."""


@dataclass(frozen=True)
class Device:
    """One device of this process."""

    name: str
    """``GPU:0`` or ``CPU:0``."""
    limit_bytes: int | None
    """What TensorFlow may allocate there; ``None`` when it has no limit of its own or none is known."""
    capability: tuple[int, int] | None = None
    """Compute capability of a GPU of NVIDIA, such as (9, 0); ``None`` for other devices."""
    maps_pages: bool = False
    """Whether its allocator puts buffers together from free pages, wherever these lie."""
    counts: bool = True
    """Whether its allocator counts all that it hands out."""

    @property
    def type(self) -> str:
        """``GPU`` or ``CPU``."""
        return self.name.partition(":")[0]

    @property
    def number(self) -> int:
        """The device's number among those of its type."""
        return int(self.name.rpartition(":")[2])

    def holds(self, name: str) -> bool:
        """Tell whether what runs on the device called ``name`` takes the memory of this device."""
        kind, number = self.name.split(":")
        return f"device:{kind}:" in name if kind == "CPU" else name.endswith(f"device:{kind}:{number}")

    def keeps_on_host(self, node: Any, index: int) -> bool:
        """Tell whether a kernel of the device leaves an output of ``node`` in host memory."""
        return self.type == "GPU" and is_host_output(node, index)

    def reads_on_host(self, node: Any, slot: int) -> bool:
        """Tell whether a kernel of the device reads input ``slot`` of ``node`` in host memory."""
        return self.type == "GPU" and is_host_input(node, slot)

    def memory(self) -> tuple[int, int] | None:
        """Return bytes in use and their peak since the last reset; ``None`` if they are not counted.

        oneDNN's allocator of the CPU device counts only allocations of 256 KiB or more, unless
        :data:`CPU_BFC` is set (``mkl_cpu_allocator.h``; seen on TensorFlow 2.21).
        """
        if not self.counts:
            return None
        try:
            info = tf.config.experimental.get_memory_info(self.name)
        except (ValueError, tf.errors.OpError):
            return None
        return int(info["current"]), int(info["peak"])

    def is_half_free(self) -> bool:
        """Tell whether half of a GPU's limit or more has been free since the last reset of the peak."""
        memory = self.memory() if self.type == "GPU" else None
        return memory is not None and self.limit_bytes is not None and 2 * memory[1] <= self.limit_bytes

    def reset_peak(self) -> None:
        """Start a new measurement of the peak."""
        try:
            tf.config.experimental.reset_memory_stats(self.name)
        except (ValueError, tf.errors.OpError):
            return


def read_devices(environ: Mapping[str, str]) -> tuple[Device, ...]:
    """Return the visible GPUs, else the CPU device; initialises TensorFlow's devices."""
    if gpus := tf.config.list_logical_devices("GPU"):
        limits = gpu_limits()
        seen = tf.config.get_visible_devices("GPU")
        physical = [*seen, *(seen[-1:] * len(gpus))]  # several logical devices on one GPU
        capabilities = [_capability(physical[number]) for number in range(len(gpus))]
        from_driver = environ.get(ALLOCATOR) == ASYNC_ALLOCATOR
        return tuple(
            Device(f"GPU:{number}", limits.get(number), known, from_driver and known is not None)
            for number, known in enumerate(capabilities)
        )
    return (read_cpu(environ),)


def read_cpu(environ: Mapping[str, str]) -> Device:
    """Return the CPU device; several logical ones share its memory."""
    is_limited = environ.get(CPU_BFC, "").lower() in ("1", "true")
    text = environ.get(CPU_BFC_LIMIT, "")
    limit = int(text) * MIB if is_limited and text.isdigit() else None
    return Device("CPU:0", limit, counts=is_limited)


def kernels_of(device: Device, environ: Mapping[str, str]) -> Kernels:
    """Return the description of what a device's kernels do with memory."""
    if device.type == "GPU":
        persistent = environ.get(PERSISTENT, "").lower() in ("1", "true")
        return Gpu(device.capability, persistent, tf.config.experimental.tensor_float_32_execution_enabled())
    threads = tf.config.threading.get_intra_op_parallelism_threads() or len(os.sched_getaffinity(0))
    kind = OneDnnCpu if _pywrap_util_port.IsMklEnabled() else PlainCpu
    return kind(threads, read_l3_bytes())


def executor_threads(device_type: str) -> int:
    """Return how many ops of a step run at once: on a GPU one thread starts them, one behind the other."""
    if device_type == "GPU":
        return 1
    return tf.config.threading.get_inter_op_parallelism_threads() or len(os.sched_getaffinity(0))


def _capability(gpu: Any) -> tuple[int, int] | None:
    found = tf.config.experimental.get_device_details(gpu).get("compute_capability")
    return None if found is None else (int(found[0]), int(found[1]))


def gpu_limits(
    list_devices: Callable[[Any], Iterable[Any]] = device_lib.list_local_devices,
) -> dict[int, int]:
    """Return the bytes that the allocator of each GPU of this process may hand out, by the GPU's number.

    TensorFlow answers by making its devices once more. Asked with another configuration than that of the ones
    at work, it would start all GPUs of the machine, and refuse where ``GPU:0`` is not the machine's first.

    Args:
        list_devices: Called with the configuration; lists the devices.
    """
    found = list_devices(context.context().config)
    limits = (int(one.memory_limit) for one in found if one.device_type == "GPU")
    return dict(enumerate(limits))


def adopt_gpus(config: Any, options: Any = tf.config) -> None:
    """Make the GPUs that a session's configuration lists visible, in its order.

    TensorFlow refuses two ways to number them, and LMS asks the device that functions run on, which may not
    have been made yet. ``visible_device_list`` is how programs for TensorFlow 1 choose a GPU by their rank.

    Args:
        config: The session's configuration, or ``None``.
        options: Where it is set.
    """
    listed = "" if config is None else config.gpu_options.visible_device_list
    gpus = options.list_physical_devices("GPU")
    if listed and gpus:
        # The device is there already, and has not been refused; or TensorFlow refuses the list itself.
        with suppress(RuntimeError, IndexError, ValueError):
            options.set_visible_devices([gpus[int(number)] for number in listed.split(",")], "GPU")


def is_out_of_memory(error: Exception) -> TypeGuard[Any]:
    """Tell whether a step failed for want of device memory.

    There was none for a tensor, or none for any of cuDNN's algorithms, or none for the scratch memory of the
    one that was chosen. The second is a ``NotFoundError`` that lists why each of them failed
    (``BestCudnnConvAlgorithm``), the third an ``UnknownError`` or ``InternalError``
    (``AllocateScratchOrFallback``). An error within a ``py_function`` is an ``UnknownError``, too, that names
    its class (``py_func.cc``). A ``MemoryError`` there is a ``ResourceExhaustedError``, and the device's only
    where it says so.
    """
    message = getattr(error, "message", "")
    if HOST_POOL in message or (PYTHONS_OWN in message and NO_TENSOR not in message):
        return False
    if isinstance(error, tf.errors.NotFoundError):
        return NO_ALGORITHM in error.message and any(sign in error.message for sign in NO_ROOM)
    if isinstance(error, tf.errors.UnknownError | tf.errors.InternalError):
        return any(sign in error.message for sign in (*NO_SCRATCH, IN_PYTHON))
    return isinstance(error, tf.errors.ResourceExhaustedError)


def is_out_of_pinned_memory(error: Exception, devices: Iterable[Device]) -> TypeGuard[Any]:
    """Tell whether a step failed because the pool of pinned host memory, which swaps fill, is full.

    Args:
        error: What the step raised.
        devices: Where it may have run. A copy's own message does not say which side has no room: it is the
            host where all devices have room.
    """
    if not isinstance(error, tf.errors.ResourceExhaustedError):
        return False
    in_copy = NO_ROOM_FOR_COPY in error.message and all(device.is_half_free() for device in devices)
    return HOST_POOL in error.message or in_copy
