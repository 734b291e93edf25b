"""The speed of a device and of its link to the host: given by the user, measured, or by generation."""

import os
import platform
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context

from lms.device.device import Device, executor_threads
from lms.simulate.cost_model import Costs, costs_of
from lms.transports.base import HOST_DEVICE
from lms.transports.device import TO_DEVICE, TO_HOST, DeviceTransport
from lms.variables.unoptimized import unoptimized

PROBE_BYTES = 64 << 20
"""One copy of this size takes a millisecond on PCIe 5, and leaves its latency far behind."""
SHARE = 8
"""A probe takes at most this part of what is free on the device, and of the pool of pinned memory. Two of
them are there at a time."""
LEAST_BYTES = 1 << 20
"""The least probe. With room for less no speed is measured: TensorFlow would wait ten seconds for memory."""
REPEATS, MOST_REPEATS = 3, 24
"""How many copies are compared with one; more where the probe is small, which says less."""
ROUNDS = 5
"""How often each function runs; its quickest run counts."""
ENOUGH_S = 0.2
"""After so many seconds a function runs no more."""
LEAST_S = 0.005
"""A piece of work that takes so long says how fast a device is, whatever its start takes."""
SIDES = (256, 512, 1024, 2048, 4096)
"""Of the square matrices whose product is timed."""
VECTORS_BYTES = tuple(1 << power for power in range(20, 27))
"""Of the vectors that are read and written."""
FLOAT_BYTES = 4
DIGITS = 2
"""Of a measured rate: the rest is chance."""

_MEASURING = threading.Lock()
"""Held while a thread measures: side by side threads would measure each other's copies."""


def costs_of_device(device: Device, bandwidth_gb_s: float | None) -> Costs:
    """Return the costs that plans for ``device`` use.

    The link of a GPU is measured, once in a process, for machines with the same GPU differ in it; and so is
    how fast a GPU computes of which no generation is known. A device too full for that gets the usual speed.

    Args:
        device: Where the step runs.
        bandwidth_gb_s: As in the configuration.
    """
    with _MEASURING:
        return _costs_of_device(device, bandwidth_gb_s)


@lru_cache
def _costs_of_device(device: Device, bandwidth_gb_s: float | None) -> Costs:
    capability = device.capability and device.capability[0]
    costs = costs_of(device.type, capability, model_name(device), platform.machine())
    costs = replace(costs, threads=executor_threads(device.type), maps_pages=device.maps_pages)
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


def model_name(device: Device) -> str:
    """Return the driver's name of the first visible GPU; empty for other devices."""
    gpus = tf.config.get_visible_devices("GPU") if device.type == "GPU" else ()
    if not gpus:  # a step can also be planned for a GPU that is not here
        return ""
    return str(tf.config.experimental.get_device_details(gpus[0]).get("device_name", ""))


Copies = Callable[[int, int], float]
"""Copies a tensor out so many times, one by one, and then back so many times; returns the seconds."""


def measured(device: Device, copies: Callable[[int], Copies] | None = None) -> tuple[float, float]:
    """Measure the bytes per second out of the device and back into it, as swaps move them.

    Several copies are compared with one: what it takes to start a function is no part of a step.

    Args:
        device: The device.
        copies: Returns what copies tensors of so many bytes; ``None``: TensorFlow.
    """
    nbytes = _probe_bytes(device)
    if copies is None:
        copies = copies_in_memory if device.type == "CPU" else partial(copies_by_swaps, device)
    with context.eager_mode():
        take = copies(nbytes)
        repeats = min(MOST_REPEATS, REPEATS * PROBE_BYTES // nbytes)
        once, out, back = (_quickest(take, *ways) for ways in ((1, 0), (1 + repeats, 0), (1, repeats)))
    rate_out, rate_back = (repeats * nbytes / (most - once if most > once else most) for most in (out, back))
    return rate_out, rate_back


def _probe_bytes(device: Device) -> int:
    """Return the bytes of a probe.

    Raises:
        ResourceExhaustedError: If there is no room for one.
    """
    rooms = [PROBE_BYTES]
    if device.limit_bytes is not None:
        used = device.memory()
        rooms.append((device.limit_bytes - (used[0] if used else 0)) // SHARE)
    if device.type == "GPU":
        rooms.append(DeviceTransport(os.environ).room_bytes() // SHARE)
    if min(rooms) < LEAST_BYTES:
        raise tf.errors.ResourceExhaustedError(None, None, "no room to measure the link")
    return min(rooms)


def _quickest(take: Copies, outs: int, backs: int) -> float:
    """Return the least seconds of a few runs; a slow one needs no other."""
    take(outs, backs)  # makes the function, and the buffers
    least, began = float("inf"), time.perf_counter()
    for _ in range(ROUNDS):
        least = min(least, take(outs, backs))
        if time.perf_counter() - began > ENOUGH_S:
            break
    return least


def copies_in_memory(nbytes: int) -> Copies:
    """Return what copies tensors of so many bytes in the memory of the CPU device."""
    with tf.device(HOST_DEVICE):
        made = tf.zeros((nbytes,), tf.uint8)

    def take(outs: int, backs: int) -> float:
        began = time.perf_counter()
        with tf.device(HOST_DEVICE):
            for _ in range(outs + backs):
                tf.raw_ops.DeepCopy(x=made)
        return time.perf_counter() - began

    return take


def copies_by_swaps(device: Device, nbytes: int) -> Copies:
    """Return what copies tensors of so many bytes as swaps do, through pinned memory.

    Eager execution's own copies are slower, for they are not pinned: on an H200 on PCIe 5 they moved 13 GB/s
    out and 7 back, and these 46 and 53. TensorFlow does not optimize the functions: this is called while it
    does that to another one.
    """
    place = f"/device:{device.name}"
    with tf.device(place):
        made = tf.zeros((nbytes,), tf.uint8)
    functions: dict[tuple[int, int], Any] = {}

    def take(outs: int, backs: int) -> float:
        if (outs, backs) not in functions:
            spec = tf.TensorSpec((nbytes,), tf.uint8)
            functions[outs, backs] = unoptimized(partial(_copied, place, outs, backs), spec)
        tf.test.experimental.sync_devices()
        began = time.perf_counter()
        functions[outs, backs](made)
        tf.test.experimental.sync_devices()
        return time.perf_counter() - began

    return take


def _copied(place: str, outs: int, backs: int, value: tf.Tensor) -> tf.Tensor:
    """Build what copies a tensor out so many times, and then back so many times."""

    def copy(op: str, tensor: tf.Tensor, after: tf.Tensor) -> tf.Tensor:
        with tf.device(place), tf.control_dependencies([after]):
            graph = tf.compat.v1.get_default_graph()
            (made,) = graph._create_op_internal(op, [tensor], [tensor.dtype], name="copy").outputs
        return made

    held = last = value
    for _ in range(outs):
        held = last = copy(TO_HOST, value, last)
    for _ in range(backs):
        last = copy(TO_DEVICE, held, last)
    with tf.device(HOST_DEVICE), tf.control_dependencies([last]):
        return tf.constant(0)
