"""The device whose memory is planned: its limit, what lies on it, and its allocator's own figures."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeGuard

import tensorflow as tf
from tensorflow.python.client import device_lib
from tensorflow.python.eager import context

from lms.shapes import static_bytes

MIB = 1 << 20
CPU_BFC, CPU_BFC_LIMIT = "TF_CPU_ALLOCATOR_USE_BFC", "TF_CPU_BFC_MEM_LIMIT_IN_MB"
"""With the first true the CPU device gets an allocator with a hard limit, the second in MiB."""

NO_ALGORITHM = "No algorithm worked!"
NO_ROOM = ("RESOURCE_EXHAUSTED", "ALLOC_FAILED", "out of memory", "OOM")
"""In what cuDNN's algorithms say of a failure: there was no scratch memory for them."""

HOST_POOL = "by allocator gpu_host_bfc"
"""In the message of an allocation for which the pool of pinned host memory has no room: swaps fill it."""


@dataclass(frozen=True)
class Device:
    """One device of this process."""

    name: str
    """``GPU:0`` or ``CPU:0``."""
    limit_bytes: int | None
    """What TensorFlow may allocate there; ``None`` when it has no limit of its own or none is known."""
    capability: tuple[int, int] | None = None
    """Compute capability of a GPU of NVIDIA, such as (9, 0); ``None`` for other devices."""
    others: int = 0
    """How many more GPUs this process sees, whose memory is not planned."""

    @property
    def type(self) -> str:
        """``GPU`` or ``CPU``."""
        return self.name.partition(":")[0]

    def memory(self) -> tuple[int, int] | None:
        """Bytes in use and their peak since the last reset; ``None`` where the allocator does not count."""
        try:
            info = tf.config.experimental.get_memory_info(self.name)
        except (ValueError, tf.errors.OpError):
            return None
        return int(info["current"]), int(info["peak"])

    def reset_peak(self) -> None:
        """Start a new measurement of the peak."""
        try:
            tf.config.experimental.reset_memory_stats(self.name)
        except (ValueError, tf.errors.OpError):
            return


def read_device(environ: Mapping[str, str]) -> Device:
    """The first visible GPU, else the CPU device. Initialises TensorFlow's devices."""
    if gpus := tf.config.list_logical_devices("GPU"):
        (gpu, *_) = tf.config.get_visible_devices("GPU")
        return Device("GPU:0", gpu_limit(), _capability(gpu), len(gpus) - 1)
    if (
        environ.get(CPU_BFC, "").lower() in ("1", "true")
        and (text := environ.get(CPU_BFC_LIMIT, "")).isdigit()
    ):
        return Device("CPU:0", int(text) * MIB)
    return Device("CPU:0", None)


def _capability(gpu: Any) -> tuple[int, int] | None:
    found = tf.config.experimental.get_device_details(gpu).get("compute_capability")
    return None if found is None else (int(found[0]), int(found[1]))


def gpu_limit(list_devices: Callable[[Any], Iterable[Any]] = device_lib.list_local_devices) -> int | None:
    """What the allocator of this process's first GPU may hand out.

    TensorFlow answers by making its devices once more. Asked with another configuration than that of the ones
    at work, it would start all GPUs of the machine, and refuse where ``GPU:0`` is not the machine's first.

    Args:
        list_devices: Who is asked, with the configuration.
    """
    found = list_devices(context.context().config)
    return next((int(one.memory_limit) for one in found if one.device_type == "GPU"), None)


def adopt_gpus(config: Any, options: Any = tf.config) -> None:
    """Number the GPUs of this process as a session's configuration does.

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
    """Whether a step failed for want of device memory: none for a tensor, or for any of cuDNN's algorithms.

    The second is a ``NotFoundError`` that lists why each of them failed (``BestCudnnConvAlgorithm``).
    """
    if isinstance(error, tf.errors.NotFoundError):
        return NO_ALGORITHM in error.message and any(sign in error.message for sign in NO_ROOM)
    return isinstance(error, tf.errors.ResourceExhaustedError) and HOST_POOL not in error.message


def pending_variable_sizes(func_graph: Any) -> list[int]:
    """Bytes of each variable a graph uses that is made only later (in a session's graph: of all of them)."""
    if not hasattr(func_graph, "variables"):
        made_later = func_graph.get_collection(tf.compat.v1.GraphKeys.GLOBAL_VARIABLES)
        return [static_bytes(variable.shape, variable.dtype.base_dtype) for variable in made_later]
    sizes = []
    for variable in func_graph.variables:
        with tf.init_scope():
            made = variable.is_initialized() if tf.executing_eagerly() else True
        if tf.is_tensor(made) and hasattr(made, "numpy") and not bool(made.numpy()):
            sizes.append(static_bytes(variable.shape, variable.dtype))
    return sizes
