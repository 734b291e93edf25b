"""The speed of a device and of its link to the host: given by the user, measured, or by generation."""

import platform
import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Protocol

import tensorflow as tf
from tensorflow.python.eager import context

from lms.device.device import Device
from lms.simulate.cost_model import Costs, costs_of
from lms.transports.base import HOST_DEVICE

PROBE_BYTES = 64 << 20
"""One copy of this size takes a millisecond on PCIe 5, and leaves its latency far behind."""
SHARE = 8
"""At most one eighth of the device is taken for a probe."""
ROUNDS = 5


@lru_cache
def costs_of_device(device: Device, bandwidth_gb_s: float | None) -> Costs:
    """Return the costs that plans for ``device`` use.

    Args:
        device: Where the step runs.
        bandwidth_gb_s: As in the configuration. With 0 copies are timed, once in a process, which takes some
            milliseconds; the fastest of five counts. A device too full for a probe gets its usual speed.
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
    """Return the driver's name of the first visible GPU; empty for other devices."""
    gpus = tf.config.get_visible_devices("GPU") if device.type == "GPU" else ()
    if not gpus:  # a step can also be planned for a GPU that is not here
        return ""
    return str(tf.config.experimental.get_device_details(gpus[0]).get("device_name", ""))


class Link(Protocol):
    """An object that makes tensors and copies them."""

    def make(self, nbytes: int, place: str) -> object:
        """Return a new tensor at ``place``, once it is there."""

    def copy(self, tensor: Any, place: str) -> None:
        """Copy a tensor to ``place`` and wait for it."""


class EagerLink:
    """Copies of TensorFlow's eager execution."""

    def make(self, nbytes: int, place: str) -> tf.Tensor:
        """Return a tensor of zeros at ``place``."""
        with tf.device(place):
            made = tf.zeros((max(1, nbytes),), tf.uint8)
        tf.test.experimental.sync_devices()
        return made

    def copy(self, tensor: tf.Tensor, place: str) -> None:
        """Copy a tensor to another device, or in the memory of its own."""
        with tf.device(place):
            if tensor.device.endswith(place):
                tf.raw_ops.DeepCopy(x=tensor)
            else:
                tf.identity(tensor)
        tf.test.experimental.sync_devices()


def measured(
    device: Device, link: Link | None = None, clock: Callable[[], float] = time.perf_counter
) -> tuple[float, float]:
    """Measure the bytes per second out of the device and back into it.

    On the CPU device both are those of a copy in memory. For a session's graph, too, this is done in eager
    execution.

    Args:
        device: The device.
        link: Makes and copies the tensors; ``None``: TensorFlow.
        clock: Tells seconds.
    """
    link = link or EagerLink()
    nbytes = min(PROBE_BYTES, (device.limit_bytes or PROBE_BYTES * SHARE) // SHARE)
    there = f"/device:{device.name}"

    def rate(source: str, target: str) -> float:
        return nbytes / min(_copy_seconds(link, nbytes, source, target, clock) for _ in range(ROUNDS))

    with context.eager_mode():
        if device.type == "CPU":
            return (rate(there, there),) * 2
        return rate(there, HOST_DEVICE), rate(HOST_DEVICE, there)


def _copy_seconds(link: Link, nbytes: int, source: str, target: str, clock: Callable[[], float]) -> float:
    """Time one copy, of a tensor that has not been copied yet.

    Eager execution keeps a copied input as a mirror on its handle: a second copy would move nothing.
    """
    tensor = link.make(nbytes, source)
    began = clock()
    link.copy(tensor, target)
    return clock() - began
