"""Give variables values in host memory, and take them from there: for each kind of device its own way.

Whoever reads such a variable between steps (a checkpoint, ``save``, ``get_weights``, Horovod's broadcast)
reads host memory; nothing else of the variable differs.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import tensorflow as tf

from lms.errors import BuildError, PlaceError, StoreError
from lms.native.build import HOST_VALUES
from lms.native.library import load_library
from lms.transports.base import HOST_DEVICE, Transport
from lms.transports.device import POOL, DeviceTransport
from lms.transports.host import HostTransport
from lms.variables.handles import value_type
from lms.variables.memory import address_of
from lms.variables.unoptimized import unoptimized

ASSIGN, READ = "AssignVariableOp", "ReadVariableOp"


class ValueWriter(Protocol):
    """Writes reads and assignments of values in host memory into a graph."""

    def write_read(self, node: Any, handle: str, dtype: int, device: str) -> None:
        """Make ``node``, which has no inputs yet, read a value in host memory."""

    def write_assign(self, node: Any, handle: str, value: str, dtype: int, device: str) -> None:
        """Make ``node``, which has no inputs yet, give a variable a value in host memory."""

    def write_enter(self, node: Any, handle: str, value: str, dtype: int, device: str) -> None:
        """Make ``node``, which has no inputs yet, give a variable a value in the device's memory."""


class HostValues(ValueWriter, Protocol):
    """One way to keep values of variables in host memory."""

    def takes(self, handle: Any) -> bool:
        """Tell whether a variable is of the device whose values are kept."""

    def put(self, handle: Any, value: Any) -> None:
        """Copy a value to host memory and make that the variable's."""

    def own(self, handle: Any, value: Any) -> None:
        """Make a value the variable's, in the device's memory: copied if it is another's in host memory."""

    def send(self, handle: Any) -> bool:
        """Move a variable's value to host memory; tell whether it may have been copied.

        Raises:
            FailedPreconditionError: If the variable has no value yet; ``NotFoundError`` if it is not made.
        """

    def fetch(self, handle: Any) -> None:
        """Move a variable's value to the device."""


class StoreValues:
    """Keeps the values of the CPU device's variables in the store of the host transport.

    No op of ours is needed: TensorFlow lets such a variable hold a buffer that its allocator has not made.
    """

    def __init__(self, store: HostTransport) -> None:
        self._store = store

    def takes(self, handle: Any) -> bool:
        """Tell whether a variable is the CPU device's."""
        return _device_type(handle) == "CPU"

    def put(self, handle: Any, value: Any) -> None:
        """Copy a value to the store and make that the variable's."""
        tf.raw_ops.AssignVariableOp(resource=handle, value=self._store.hold(value))

    def own(self, handle: Any, value: Any) -> None:
        """Make a value the variable's; copy it if it lies in the store."""
        if self._store.holds(address_of(value)):
            value = self._store.fetch(value)
        tf.raw_ops.AssignVariableOp(resource=handle, value=value)

    def send(self, handle: Any) -> bool:
        """Move a variable's value to the store; tell whether it was copied."""
        value = _read(handle)
        if self._store.holds(address_of(value)):
            return False
        self.put(handle, value)
        return True

    def fetch(self, handle: Any) -> None:
        """Move a variable's value to the device's memory."""
        tf.raw_ops.AssignVariableOp(resource=handle, value=self._store.fetch(_read(handle)))

    def write_read(self, node: Any, handle: str, dtype: int, device: str) -> None:
        """Make ``node`` TensorFlow's own read."""
        write_variable_op(node, READ, [handle], dtype, device)

    def write_assign(self, node: Any, handle: str, value: str, dtype: int, device: str) -> None:
        """Make ``node`` TensorFlow's own assignment."""
        write_variable_op(node, ASSIGN, [handle, value], dtype, device)

    write_enter = write_assign


class PinnedValues:
    """Keeps the values of GPUs' variables in TensorFlow's pinned host memory.

    TensorFlow has no op that gives a variable of a GPU a value there, so these are ours
    (``ops/host_values.cc``).

    Args:
        environ: Where the cache of built ops is looked up.

    Raises:
        PlaceError: If the ops cannot be compiled or loaded.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._ops = load_ops(HOST_VALUES, environ)
        self._moves: dict[tuple[Any, str], Callable[..., Any]] = {}

    def takes(self, handle: Any) -> bool:
        """Tell whether a variable is a GPU's."""
        return _device_type(handle) == "GPU"

    def put(self, handle: Any, value: Any) -> None:
        """Copy a value to pinned memory and make that the variable's."""
        with tf.device(handle.device), _explained():
            self._ops.lms_set_host_value(resource=handle, value=value)

    def own(self, handle: Any, value: Any) -> None:
        """Make a value the variable's; copy it if it lies in pinned memory."""
        with tf.device(handle.device):
            self._ops.lms_set_device_value(resource=handle, value=value)

    def send(self, handle: Any) -> bool:
        """Move a variable's value to pinned memory; whether it lay there is not told."""
        # Eager execution would bring the value back to the device between the two ops, which may be full.
        kind = value_type(handle), handle.device
        if kind not in self._moves:
            spec = tf.TensorSpec((), tf.resource)
            self._moves[kind] = unoptimized(partial(self._moved, *kind), spec)
        with _explained():
            self._moves[kind](handle)
        return True

    def _moved(self, dtype: Any, device: str, handle: tf.Tensor) -> tf.Tensor:
        """Build what moves a variable's value to pinned memory."""
        with tf.device(device):
            value = self._ops.lms_get_host_value(resource=handle, dtype=dtype)
            moved = self._ops.lms_set_host_value(resource=handle, value=value)
        with tf.device(HOST_DEVICE), tf.control_dependencies([moved]):
            return tf.constant(0)

    def fetch(self, handle: Any) -> None:
        """Move a variable's value to the device's memory."""
        with tf.device(handle.device):
            value = self._ops.lms_get_host_value(resource=handle, dtype=value_type(handle))
            self._ops.lms_set_device_value(resource=handle, value=value)

    def write_read(self, node: Any, handle: str, dtype: int, device: str) -> None:
        """Make ``node`` the op that reads pinned memory without a copy."""
        write_variable_op(node, "LmsGetHostValue", [handle], dtype, device)

    def write_assign(self, node: Any, handle: str, value: str, dtype: int, device: str) -> None:
        """Make ``node`` the op that gives a variable pinned memory without a copy."""
        write_variable_op(node, "LmsSetHostValue", [handle, value], dtype, device)

    def write_enter(self, node: Any, handle: str, value: str, dtype: int, device: str) -> None:
        """Make ``node`` the op that gives a variable the device's memory without a copy."""
        write_variable_op(node, "LmsSetDeviceValue", [handle, value], dtype, device)


def host_values(transport: Transport, environ: Mapping[str, str]) -> HostValues:
    """Return the way that goes with a transport.

    Raises:
        PlaceError: If there is none, or its ops cannot be built.
    """
    if isinstance(transport, HostTransport):
        return StoreValues(transport)
    if isinstance(transport, DeviceTransport):
        return PinnedValues(environ)
    raise PlaceError(
        f"variables cannot lie on the host: {transport.note or f'transport is {transport.name!r}'}"
    )


def load_ops(source: Path, environ: Mapping[str, str]) -> Any:
    """Return the ops of a source file that values in host memory take.

    Raises:
        PlaceError: If they cannot be compiled or loaded.
    """
    try:
        return load_library(source, environ).ops
    except BuildError as error:
        raise PlaceError(f"variables cannot lie on the host: {error}") from error


def write_variable_op(node: Any, op_type: str, inputs: list[str], dtype: int, device: str) -> None:
    """Make ``node``, which has no inputs yet, an op on a variable."""
    node.op, node.device = op_type, device
    node.input.extend(inputs)
    node.attr["dtype"].type = dtype
    if op_type == ASSIGN:
        node.attr["validate_shape"].b = False


def write_sharing(node: Any, handle: str, device: str) -> None:
    """Make ``node``, which has no inputs yet, let later reads share a variable's buffer again."""
    node.op, node.device = "DisableCopyOnRead", device
    node.input.append(handle)


@contextmanager
def _explained() -> Iterator[None]:
    """Say what to do when TensorFlow's pool of pinned memory is full."""
    try:
        yield
    except tf.errors.ResourceExhaustedError as error:
        raise StoreError(
            f"TensorFlow's pool of pinned host memory has no room for a variable; raise {POOL} (MiB) as far "
            "as the host has memory, or set optimizer_state or variables to 'device'"
        ) from error


def _read(handle: Any) -> Any:
    return tf.raw_ops.ReadVariableOp(resource=handle, dtype=value_type(handle))


def _device_type(handle: Any) -> str:
    return str(tf.DeviceSpec.from_string(handle.device).device_type)
