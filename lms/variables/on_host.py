"""Keep the values of variables in host memory between steps."""

import threading
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

import tensorflow as tf

from lms.config import LMSConfig
from lms.errors import LMSError, PlaceError, StoreError
from lms.native.build import HOST_STORE, HOST_VALUES
from lms.variables.handles import static_bytes, value_shape, value_type, variable_handles
from lms.variables.host_values import HostValues, load_ops

KINDS = {True: "optimizer_state", False: "variables"}
"""By whether only updates read a variable: the setting that says where its value lies."""

INITIALISED = 3
"""How many times a variable's bytes its initializer takes at most: a random one has draws and their product
beside its result."""

NEEDS = "{0} is 'host' and {1}; needed {2}; or set {0} to 'device'"


def require_host_variables(config: LMSConfig, environ: Mapping[str, str]) -> None:
    """Check that values of variables can lie in host memory here, where the configuration wants that.

    Raises:
        PlaceError: If they cannot.
    """
    asked = [name for name in KINDS.values() if getattr(config, name) == "host"]
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
        room: Returns the free bytes of a handle's device beside its margin; ``None`` where that is not known.
    """

    def __init__(
        self, config: LMSConfig, values: Callable[[], HostValues], room: Callable[[Any], int | None]
    ) -> None:
        self._config, self.values, self._room = config, values, room
        self._streams: dict[bool, bool] = {}
        self.keep_all()
        self._held: dict[int, weakref.ref[Any]] = {}
        """By the number of a handle's object the handle, of variables whose values lie in host memory."""
        self._without_room: dict[int, bool] = {}
        """Likewise of those whose first values found no room on the device whether they are trainable."""
        self._moving = threading.Lock()
        self.sent = 0
        """Copies to host memory so far that were made between steps."""

    @property
    def may_stream(self) -> bool:
        """Whether values of any variables may come to lie in host memory."""
        return any(getattr(self._config, name) != "device" for name in KINDS.values())

    @property
    def streams(self) -> bool:
        """Whether steps are planned with variables that stream."""
        return any(self._streams.values())

    @property
    def is_on(self) -> bool:
        """Whether values of any variables lie in host memory between steps."""
        return self.streams or bool(self._held)

    @property
    def planned_with(self) -> tuple[bool, ...]:
        """Which variables stream, for whoever keeps plans."""
        return tuple(self._streams.values())

    def wants(self, is_state: bool) -> bool:
        """Tell whether variables stream that only updates read, or such that others read."""
        return self._streams[is_state]

    def take_more(self) -> str:
        """Have one more kind of variables stream, if the configuration leaves that open.

        Returns:
            The name of its setting; empty where none is left, or values cannot lie in host memory here.
        """
        for is_state, name in KINDS.items():
            if self._is_open(is_state):
                with suppress(LMSError):
                    self.values()
                    self._streams[is_state] = True
                    return name
        return ""

    def keep_all(self) -> None:
        """Have no variables stream but those of which the configuration says so."""
        self._streams = {is_state: getattr(self._config, name) == "host" for is_state, name in KINDS.items()}

    def wants_new(self, handle: Any, *, trainable: bool) -> bool:
        """Tell whether the first value of a variable goes to the host, before a step shows who reads it."""
        nbytes = _nbytes(handle)
        if nbytes < max(1, self._config.min_tensor_bytes):
            return False
        if self.wants(is_state=False) if trainable else self.streams:
            return self._takes(handle)
        if not self._is_open(is_state=not trainable) or self.has_room(handle, INITIALISED * nbytes):
            return False
        self._without_room[id(handle)] = trainable
        return self._takes(handle)

    def lacks_room(self, inputs: Sequence[Any]) -> bool:
        """Tell whether a step's variables do not stream whose first values found no room on the device.

        Args:
            inputs: What the step's function is called with.
        """
        found = [one for one in variable_handles(inputs) if self.holds(one) and id(one) in self._without_room]
        kept = [one for one in found if not self.wants(is_state=not self._without_room[id(one)])]
        return bool(kept) and not self.has_room(kept[0], sum(map(_nbytes, kept)))

    def holds(self, handle: Any) -> bool:
        """Tell whether values of a variable belong in host memory."""
        known = self._held.get(id(handle))
        return known is not None and known() is handle

    def put(self, handle: Any, value: Any) -> None:
        """Give a variable a value in host memory, and remember that it lies there."""
        self.values().put(handle, value)
        self.sent += 1
        self._remember(handle)

    def offer(self, handle: Any, value: Any) -> bool:
        """Give a variable a value in host memory; return False where that is full and nobody asked for it."""
        try:
            self.put(handle, value)
        except StoreError:
            if self._is_asked or self.holds(handle):
                raise
            return False
        return True

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
        if not self.has_room(handle, _nbytes(handle)):  # TensorFlow would wait for it, ten seconds each time
            return
        with suppress(tf.errors.ResourceExhaustedError):  # without room it is used where it lies
            self.values().fetch(handle)
            self._forget(id(handle))

    def has_room(self, handle: Any, nbytes: int) -> bool:
        """Tell whether a variable's device has room for so many bytes, as far as that is known."""
        room = self._room(handle)
        return room is None or nbytes <= room

    def _remember(self, handle: Any) -> None:
        key = id(handle)
        self._held[key] = weakref.ref(handle, lambda _: self._forget(key))

    def _forget(self, key: int) -> None:
        self._held.pop(key, None)
        self._without_room.pop(key, None)

    def _is_open(self, is_state: bool) -> bool:
        return getattr(self._config, KINDS[is_state]) == "auto" and not self._streams[is_state]

    def _takes(self, handle: Any) -> bool:
        """Tell whether a variable's value can lie in host memory."""
        try:
            return self.values().takes(handle)
        except LMSError:
            if self._is_asked:
                raise
            return False

    @property
    def _is_asked(self) -> bool:
        """Whether somebody wants values in host memory: else they lie there only where they can."""
        return any(getattr(self._config, name) == "host" for name in KINDS.values())


def _nbytes(handle: Any) -> int:
    return static_bytes(value_shape(handle), value_type(handle))
