"""Keep the values of variables in host memory between steps.

A variable of the CPU device may hold a buffer that is not of the device's allocator: the store's. Whoever
reads the variable between steps (a checkpoint, ``save``, ``get_weights``, Horovod's broadcast) reads that;
whoever assigns to it has the new value copied there. Nothing else of the variable differs.
"""

import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

import tensorflow as tf

from lms.config import LMSConfig
from lms.device.variable_handles import static_bytes, value_shape, value_type, variable_handles
from lms.device.variable_memory import address_of
from lms.errors import PlaceError
from lms.transports.base import Transport
from lms.transports.host import HostTransport

NEEDS_STORE = "{} is 'host' and {}; needed the CPU device and transport 'host' or 'file'; set it to 'device'"


def require_host_variables(config: LMSConfig) -> None:
    """Check that values of variables can lie in host memory here, where the configuration wants that.

    Raises:
        PlaceError: If they cannot.
    """
    asked = [name for name in ("optimizer_state", "variables") if getattr(config, name) == "host"]
    if not asked:
        return
    if tf.config.get_visible_devices("GPU"):
        raise PlaceError(NEEDS_STORE.format(asked[0], "a GPU is visible, for which that is still to come"))
    if config.transport not in ("auto", "host", "file"):
        raise PlaceError(NEEDS_STORE.format(asked[0], f"transport is {config.transport!r}"))


class HostVariables:
    """Holds the values of variables in the store of the host transport.

    Args:
        config: Which variables, and of what size.
        transport: Returns the transport.
    """

    def __init__(self, config: LMSConfig, transport: Callable[[], Transport]) -> None:
        self._config, self._transport = config, transport
        self._held: dict[int, weakref.ref[Any]] = {}
        """By the number of a handle's object the handle, of variables whose values lie in the store."""
        self.sent = 0
        """Copies to the store so far that were made between steps."""

    @property
    def is_on(self) -> bool:
        """Whether any variables' values lie in host memory between steps."""
        return "host" in (self._config.optimizer_state, self._config.variables)

    def wants(self, is_state: bool) -> bool:
        """Tell whether variables stream that only updates read, or such that others read."""
        return (self._config.optimizer_state if is_state else self._config.variables) == "host"

    def wants_new(self, handle: Any, *, trainable: bool) -> bool:
        """Tell whether the first value of a variable goes to the store, before a step shows who reads it."""
        wanted = self.wants(is_state=False) if trainable else self.is_on
        return wanted and self._is_large(handle)

    def holds(self, handle: Any) -> bool:
        """Tell whether values of a variable belong in the store."""
        known = self._held.get(id(handle))
        return known is not None and known() is handle

    def hold(self, handle: Any, value: Any) -> Any:
        """Return a value for a variable, copied to the store, and remember that it lies there."""
        key = id(handle)
        self._held[key] = weakref.ref(handle, lambda _: self._held.pop(key, None))
        self.sent += 1
        return self._store().hold(value)

    def settle(self, inputs: Sequence[Any], streamed: Collection[int]) -> None:
        """Move the values of a step's variables to where the step takes them from.

        Args:
            inputs: What the step's function is called with.
            streamed: The numbers of those inputs whose values lie in the store between steps.
        """
        for number, one in enumerate(inputs):
            for handle in variable_handles([one]):
                if number in streamed:
                    self.send(handle)
                elif self.holds(handle):
                    self._fetch(handle)

    def send(self, handle: Any) -> None:
        """Move a variable's value to the store, unless it lies there or is not made yet."""
        try:
            value = tf.raw_ops.ReadVariableOp(resource=handle, dtype=value_type(handle))
        except tf.errors.FailedPreconditionError:
            return
        if not self._store().holds(address_of(value)):
            tf.raw_ops.AssignVariableOp(resource=handle, value=self.hold(handle, value))

    def _fetch(self, handle: Any) -> None:
        self._held.pop(id(handle), None)
        value = tf.raw_ops.ReadVariableOp(resource=handle, dtype=value_type(handle))
        tf.raw_ops.AssignVariableOp(resource=handle, value=self._store().fetch(value))

    def _is_large(self, handle: Any) -> bool:
        nbytes = static_bytes(value_shape(handle), value_type(handle))
        return nbytes >= max(1, self._config.min_tensor_bytes)

    def _store(self) -> HostTransport:
        transport = self._transport()
        if not isinstance(transport, HostTransport):
            raise PlaceError(
                NEEDS_STORE.format("optimizer_state or variables", transport.note or transport.name)
            )
        return transport

    def require_store(self) -> None:
        """Check that there is a store for values.

        Raises:
            PlaceError: If the transport has none.
        """
        if self.is_on:
            self._store()
