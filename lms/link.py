"""How fast a device and its link to the host are: given by the user, measured, or known of its generation."""

import platform
import time
from collections.abc import Callable
from functools import lru_cache

import tensorflow as tf
from tensorflow.python.eager import context

from lms.costs import Costs, costs_of
from lms.device import Device
from lms.transports.base import HOST_DEVICE

PROBE_BYTES = 64 << 20
"""One copy of this size takes a millisecond on PCIe 5, and leaves its latency far behind."""
SHARE = 8
"""At most one eighth of the device is taken for a probe."""
ROUNDS = 5


@lru_cache
def costs_of_device(device: Device, bandwidth_gb_s: float | None) -> Costs:
    """What plans for ``device`` count with.

    Args:
        device: Where the step runs.
        bandwidth_gb_s: As in the configuration. With 0 copies are timed, once in a process, which takes some
            milliseconds; the fastest of five counts. A device too full for a probe counts as usual.
    """
    capability = device.capability and device.capability[0]
    costs = costs_of(device.type, capability, _model_name(device), platform.machine())
    if bandwidth_gb_s is None:
        return costs
    if bandwidth_gb_s:
        return costs.with_link(bandwidth_gb_s * 1e9)
    try:
        return costs.with_link(*measured(device))
    except tf.errors.ResourceExhaustedError:
        return costs


def _model_name(device: Device) -> str:
    """What the driver calls the first visible GPU; nothing for other devices."""
    gpus = tf.config.get_visible_devices("GPU") if device.type == "GPU" else ()
    if not gpus:  # a step can also be planned for a GPU that is not here
        return ""
    return str(tf.config.experimental.get_device_details(gpus[0]).get("device_name", ""))


def measured(device: Device) -> tuple[float, float]:
    """Bytes a second out of the device and back into it.

    On the CPU device both are those of a copy in memory. For a session's graph, too, this is done in eager
    execution.
    """
    nbytes = min(PROBE_BYTES, (device.limit_bytes or PROBE_BYTES * SHARE) // SHARE)
    there = f"/{device.name}"
    with context.eager_mode(), tf.device(there):
        held = tf.zeros((max(1, nbytes),), tf.uint8)
        if device.type == "CPU":
            rate = nbytes / _fastest(lambda: tf.raw_ops.DeepCopy(x=held))
            return rate, rate
        with tf.device(HOST_DEVICE):
            sent = tf.identity(held)
            out_s = _fastest(lambda: tf.identity(held))
        in_s = _fastest(lambda: tf.identity(sent))
    return nbytes / out_s, nbytes / in_s


def _fastest(copy: Callable[[], tf.Tensor]) -> float:
    """Seconds of the fastest of some copies, each waited for."""
    best = float("inf")
    for _ in range(ROUNDS):
        began = time.perf_counter()
        copy()
        tf.test.experimental.sync_devices()
        best = min(best, time.perf_counter() - began)
    return best
