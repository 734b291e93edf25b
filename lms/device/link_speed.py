"""The speed of a device and of its link to the host: given by the user, measured, or by generation."""

import platform
import time
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, Protocol

import tensorflow as tf
from tensorflow.python.eager import context

from lms.device.device import Device, executor_threads
from lms.simulate.cost_model import Costs, costs_of
from lms.transports.base import HOST_DEVICE

PROBE_BYTES = 64 << 20
"""One copy of this size takes a millisecond on PCIe 5, and leaves its latency far behind."""
SHARE = 8
"""At most one eighth of the device is taken for a probe."""
ROUNDS = 5
LEAST_S = 0.005
"""A piece of work that takes so long says how fast a device is, whatever its start takes."""
SIDES = (256, 512, 1024, 2048, 4096)
"""Of the square matrices whose product is timed."""
VECTORS_BYTES = tuple(1 << power for power in range(20, 27))
"""Of the vectors that are read and written."""
FLOAT_BYTES = 4
DIGITS = 2
"""Of a measured rate: the rest is chance."""


@lru_cache
def costs_of_device(device: Device, bandwidth_gb_s: float | None) -> Costs:
    """Return the costs that plans for ``device`` use.

    The link of a GPU is measured, once in a process, for machines with the same GPU differ in it; and so is
    how fast a GPU computes of which no generation is known. A device too full for that gets the usual speed.

    Args:
        device: Where the step runs.
        bandwidth_gb_s: As in the configuration.
    """
    capability = device.capability and device.capability[0]
    costs = costs_of(device.type, capability, _model_name(device), platform.machine())
    costs = replace(costs, threads=executor_threads(device.type))
    is_here = device.type == "CPU" or device.number < len(tf.config.list_logical_devices("GPU"))
    if bandwidth_gb_s:
        return costs.with_link(bandwidth_gb_s * 1e9)
    if not is_here or (bandwidth_gb_s is None and device.type == "CPU"):
        return costs
    try:
        costs = costs.with_link(*map(_rounded, measured(device)))
        if device.type == "GPU" and capability is None:
            flops, rate = map(_rounded, measured_compute(device))
            costs = replace(costs, flops_per_s=flops, device_bytes_per_s=rate)
    except tf.errors.OpError:  # no room, or a kernel that this device lacks
        return costs
    return costs


def _rounded(rate: float) -> float:
    return float(f"{rate:.{DIGITS}g}")


def measured_compute(device: Device) -> tuple[float, float]:
    """Measure the arithmetic and the bytes that a device's kernels get done in a second.

    The first by a product of matrices, the second by reading and writing a vector; each grows until
    it takes :data:`LEAST_S`.
    """
    room = (device.limit_bytes or PROBE_BYTES * SHARE) // SHARE
    flops = rate = 0.0
    with context.eager_mode(), tf.device(f"/device:{device.name}"):
        for side in SIDES:
            if flops and 3 * FLOAT_BYTES * side * side > room:
                break
            matrix = tf.zeros((side, side))
            seconds = _least_seconds(partial(tf.linalg.matmul, matrix, matrix))
            flops = 2 * side**3 / seconds
            if seconds >= LEAST_S:
                break
        for nbytes in VECTORS_BYTES:
            if rate and 2 * nbytes > room:
                break
            seconds = _least_seconds(partial(tf.negative, tf.zeros((nbytes // FLOAT_BYTES,))))
            rate = 2 * nbytes / seconds
            if seconds >= LEAST_S:
                break
    return flops, rate


def _least_seconds(work: Callable[[], object]) -> float:
    least = float("inf")
    for _ in range(ROUNDS):
        tf.test.experimental.sync_devices()
        began = time.perf_counter()
        work()
        tf.test.experimental.sync_devices()
        least = min(least, time.perf_counter() - began)
    return least


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
