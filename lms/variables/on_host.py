"""Keep the values of variables in host memory between steps."""

import threading
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

import tensorflow as tf

from lms.config import LMSConfig
from lms.errors import PlaceError
from lms.native.build import HOST_STORE, HOST_VALUES
from lms.variables.handles import static_bytes, value_shape, value_type, variable_handles
from lms.variables.host_values import HostValues, load_ops

NEEDS = "{0} is 'host' and {1}; needed {2}; or set {0} to 'device'"


def require_host_variables(config: LMSConfig, environ: Mapping[str, str]) -> None:
    """Check that values of variables can lie in host memory here, where the configuration wants that.

    Raises:
        PlaceError: If they cannot.
    """
    asked = [name for name in ("optimizer_state", "variables") if getattr(config, name) == "host"]
    if not asked:
        return
    kind = "file" if config.transport == "auto" and config.store_dir else config.transport
    used = f"transport is {kind!r}" if kind == config.transport else "store_dir (LMS_STORE) is set"
    if tf.config.get_visible_devices("GPU"):
        if kind not in ("auto", "device"):
            raise PlaceError(NEEDS.format(asked[0], used, "transport 'device' where a GPU is visible"))
        load_ops(HOST_VALUES, environ)
        return
    if kind not in ("auto", "host", "file"):
        raise PlaceError(NEEDS.format(asked[0], used, "transport 'host' or 'file' on the CPU device"))
    load_ops(HOST_STORE, environ)


class HostVariables:
    """Knows whose values lie in host memory, and moves them there.

    Args:
        config: Which variables, and of what size.
        values: Returns the way to do so; raises ``PlaceError`` if there is none.
    """

    def __init__(self, config: LMSConfig, values: Callable[[], HostValues]) -> None:
        self._config, self.values = config, values
        self._held: dict[int, weakref.ref[Any]] = {}
        """By the number of a handle's object the handle, of variables whose values lie in host memory."""
        self._moving = threading.Lock()
        self.sent = 0
        """Copies to host memory so far that were made between steps."""

    @property
    def is_on(self) -> bool:
        """Whether any variables' values lie in host memory between steps."""
        return "host" in (self._config.optimizer_state, self._config.variables)

    def wants(self, is_state: bool) -> bool:
        """Tell whether variables stream that only updates read, or such that others read."""
        return (self._config.optimizer_state if is_state else self._config.variables) == "host"

    def wants_new(self, handle: Any, *, trainable: bool) -> bool:
        """Tell whether the first value of a variable goes to the host, before a step shows who reads it."""
        wanted = self.wants(is_state=False) if trainable else self.is_on
        return wanted and self._is_large(handle) and self.values().takes(handle)

    def holds(self, handle: Any) -> bool:
        """Tell whether values of a variable belong in host memory."""
        known = self._held.get(id(handle))
        return known is not None and known() is handle

    def put(self, handle: Any, value: Any) -> None:
        """Give a variable a value in host memory, and remember that it lies there."""
        self.values().put(handle, value)
        self.sent += 1
        self._remember(handle)

    def may_share(self, handle: Any) -> bool:
        """Tell whether a value for a variable of the device may be another's in host memory."""
        return bool(self._held) and self.values().takes(handle)

    def own(self, handle: Any, value: Any) -> None:
        """Give a variable that is the device's a value in the device's memory."""
        self.values().own(handle, value)

    def settle(
        self, inputs: Sequence[Any], streamed: Collection[int], is_planned: Callable[[str], bool]
    ) -> None:
        """Move the values of a step's variables to where the step takes them from.

        A value that has been moved to host memory before is not looked at again: if it is on the device, a
        step in another thread has it there, and a copy that is read meanwhile would undo what that step does.

        Args:
            inputs: What the step's function is called with.
            streamed: The numbers of those inputs whose values lie in host memory between steps.
            is_planned: Whether the step's plan is for the device of this name; another has one of its own.
        """
        for number, one in enumerate(inputs):
            for handle in variable_handles([one]):
                with self._moving:
                    if number not in streamed:
                        if self.holds(handle) and is_planned(handle.device):
                            self._fetch(handle)
                    elif not self.holds(handle):
                        self.send(handle)

    def send(self, handle: Any) -> None:
        """Move a variable's value to host memory, unless it lies there or is not made yet."""
        try:
            self.sent += self.values().send(handle)
        except (tf.errors.FailedPreconditionError, tf.errors.NotFoundError):
            return
        self._remember(handle)

    def _fetch(self, handle: Any) -> None:
        with suppress(tf.errors.ResourceExhaustedError):  # without room it is used where it lies
            self.values().fetch(handle)
            self._held.pop(id(handle), None)

    def _remember(self, handle: Any) -> None:
        key = id(handle)
        self._held[key] = weakref.ref(handle, lambda _: self._held.pop(key, None))

    def _is_large(self, handle: Any) -> bool:
        nbytes = static_bytes(value_shape(handle), value_type(handle))
        return nbytes >= max(1, self._config.min_tensor_bytes)
