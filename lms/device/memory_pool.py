"""Shape the memory pool of a device: in one region, with free chunks for small buffers and for batches.

The CPU's allocator under a hard limit takes its pool bit by bit: regions of 2, 4, 8 MiB and so on, and a
buffer lies in one of them. A step that comes near the limit then fails with a third of its memory free. A
buffer as large as the limit, made before any other and freed at once, has the allocator make one region of
it. Its pages are never touched, so they cost nothing.

The statistics of a normalisation are a few hundred bytes and live from the forward pass to the backward.
TensorFlow's allocator gives each a piece of the smallest free chunk; in a step that is short of memory that
is soon a large one, which does not become whole again while they live. A free chunk that is just large enough
for all of them, and that something keeps apart from the rest, takes them instead.

What keeps it apart is a buffer of the same size, allocated right after it. If a smaller free chunk took the
first of the two, that chunk is the room, once the first is freed. If none was there, the second cannot have
found one either, and lies right behind the first.

An input pipeline on the CPU device makes the next batches ready beside the steps, at any time, in memory of
the same allocator. Between the step's buffers each would have free memory lie in other pieces. They get room
of their own in the same way: as many buffers as there may be batches, and one more that keeps them apart.
"""

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from typing import Any

import tensorflow as tf
from tensorflow.python.client.session import BaseSession
from tensorflow.python.eager import context

from lms.device.device import Device, read_cpu
from lms.ir.liveness import SMALL_BYTES, round_up
from lms.process_state import tensorflow_is_initialised
from lms.simulate.bfc_arena import FIRST_REGION_BYTES

logger = logging.getLogger("lms")
FLOAT_BYTES, MIB = 4, 1 << 20

SMALL, BATCHES = "small buffers", "batches"
"""The uses of a chunk."""

FORCED_GROWTH = "TF_FORCE_GPU_ALLOW_GROWTH"
"""``true`` or ``false``: whether the memory of all GPUs grows, whatever the program says."""

_is_whole = False
"""Whether the CPU's pool is one region. TensorFlow has one for all sessions of a process, and for good."""


class PoolClaim:
    """Claims the pool when TensorFlow makes its devices, which it does before the first tensor.

    A session makes devices of its own, with its own threads, and shares the pool.

    Args:
        environ: The process's variables; they say whether the CPU device has a hard limit.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ, self._device = environ, read_cpu(environ)
        # The first region is there by then: the shape of what is asked for lies in it.
        self._nbytes = (self._device.limit_bytes or 0) - FIRST_REGION_BYTES
        self._wrapped: list[tuple[type, str, Any, Any]] = []
        """What stands for methods of TensorFlow: class, name, method, and what stands for it."""
        self._lock, self._is_claiming = threading.RLock(), False

    def install(self) -> None:
        """Wait for TensorFlow to make its devices, unless they are there or the pool has no limit."""
        if self._nbytes <= 0 or self._wrapped or tensorflow_is_initialised():
            return
        self._wrap(context.Context, "ensure_initialized", self._claim)
        self._wrap(BaseSession, "__init__", self._claim_beside_session)

    def _wrap(self, kind: type, name: str, then: Callable[[], None]) -> None:
        plain = getattr(kind, name)

        @wraps(plain)
        def own(*arguments: Any, **options: Any) -> None:
            plain(*arguments, **options)
            then()

        self._wrapped.append((kind, name, plain, own))
        setattr(kind, name, own)

    def uninstall(self) -> None:
        """Wait no longer; where somebody has wrapped the method since, ours stays and does nothing."""
        for kind, name, plain, own in self._wrapped:
            if getattr(kind, name) is own:
                setattr(kind, name, plain)
        self._wrapped = []

    @property
    def is_whole(self) -> bool:
        """Tell whether the pool is one region."""
        return _is_whole

    def leaves_growing(self, device_type: str) -> bool:
        """Tell whether TensorFlow takes a device's memory bit by bit, and not most of it at once."""
        if device_type == "CPU":
            return not self.is_whole
        if forced := self._environ.get(FORCED_GROWTH, "").lower():  # it goes before what the program says
            return forced == "true"
        gpus = tf.config.list_physical_devices("GPU")
        return any(tf.config.experimental.get_memory_growth(gpu) for gpu in gpus)

    def _claim(self) -> None:
        with self._lock:  # no other thread allocates anything before it is made
            if not self._wrapped or self._is_claiming:
                return
            self._is_claiming = True  # what follows makes devices again
            try:
                if not tf.config.get_visible_devices("GPU") and _is_unused(self._device):
                    _make_whole(self._device.name, self._nbytes)
                    self._device.reset_peak()  # it is to tell what the program takes
            finally:
                self.uninstall()
                self._is_claiming = False

    def _claim_beside_session(self) -> None:
        if self._wrapped and not tf.config.get_visible_devices("GPU"):
            context.ensure_initialized()  # and this claims


def _is_unused(device: Device) -> bool:
    """Tell whether no session has taken memory before: what is left of the pool is unknown then."""
    return device.memory() == (0, 0)


def _make_whole(device: str, nbytes: int) -> None:
    global _is_whole
    with context.eager_mode(), tf.device(device):
        try:
            tf.raw_ops.Empty(shape=[nbytes // MIB, MIB], dtype=tf.uint8, init=False)  # of 32-bit sizes
        except tf.errors.OpError:
            return  # the system does not give this process so much address space
    _is_whole = True


def hold(nbytes: int, device: str) -> Any:
    """Take memory on a device until the result goes; ``None`` where there is no room, or none is wanted."""
    with context.eager_mode(), tf.device(device):
        try:
            return tf.zeros((nbytes // FLOAT_BYTES,)) if nbytes else None
        except tf.errors.ResourceExhaustedError:
            return None


class Rooms:
    """The free chunks for small buffers and for batches, on each device of this process."""

    def __init__(self) -> None:
        self._guards: dict[tuple[str, str], tuple[int, int, Any]] = {}
        """By device and use the bytes of a chunk, and of what keeps it apart, with that itself."""

    def nbytes(self, device: str, use: str) -> int:
        """Return the bytes of a device's chunk for a use, :data:`SMALL` or :data:`BATCHES`."""
        return self._guards.get((device, use), (0, 0, None))[0]

    def kept_bytes(self, device: str) -> int:
        """Return the bytes that keep a device's chunks apart: one small chunk, and one batch."""
        return sum(nbytes for (name, _), (_, nbytes, _) in self._guards.items() if name == device)

    def make_small(self, nbytes: int, device: str, pending: Iterable[int] = ()) -> None:
        """Have a free chunk of ``nbytes`` for small buffers on ``device``, unless there is no room for it.

        Args:
            nbytes: The size; 0 where no room is wanted.
            device: The device's name.
            pending: Bytes of each variable that is made only later: small ones will lie there for good.
        """
        if nbytes:
            nbytes += sum(round_up(size) for size in pending if size <= SMALL_BYTES)
            self._make((nbytes,), device, SMALL)

    def make_for_batches(self, batches: Sequence[int], device: str) -> None:
        """Have free memory on ``device`` for batches of these bytes, unless there is no room for it."""
        if batches:
            self._make(batches, device, BATCHES)

    def _make(self, sizes: Sequence[int], device: str, use: str) -> None:
        """Allocate buffers of one size and one more, which stays; the others are freed.

        What kept a smaller chunk apart is freed then. A session's memory is of the same allocator.
        """
        if sum(sizes) <= self.nbytes(device, use):
            return
        with context.eager_mode(), tf.device(device):
            try:
                *room, guard = (tf.zeros((size // FLOAT_BYTES,)) for size in (*sizes, sizes[-1]))
            except tf.errors.ResourceExhaustedError:
                logger.info("no room on %s to keep %d bytes for %s", device, sum(sizes), use)
                return
            del room
        self._guards[device, use] = sum(sizes), sizes[-1], guard
