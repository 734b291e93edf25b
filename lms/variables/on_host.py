"""Keep the values of variables in host memory between steps."""

import threading
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

import tensorflow as tf

from lms.config import HOST_SHARES, LMSConfig
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
        self.shares: tuple[float, float] = (
            float(config.optimizer_state == "host"),
            float(config.variables == "host"),
        )
        """How much streams of the bytes that only updates read, and of those that others read, too."""
        self._held: dict[int, weakref.ref[Any]] = {}
        """By the number of a handle's object the handle, of variables whose values lie in host memory."""
        self._without_room: set[int] = set()
        """The numbers of those whose first values found no room on the device."""
        self._moving = threading.Lock()
        self.obstacle = ""
        """Why no values can lie in host memory here, once that was asked and is so."""
        self.sent = 0
        """Copies to host memory so far that were made between steps."""

    @property
    def may_stream(self) -> bool:
        """Whether values of any variables may come to lie in host memory."""
        return any(getattr(self._config, name) != "device" for name in KINDS.values())

    @property
    def streams(self) -> bool:
        """Whether steps are planned with variables that stream."""
        return any(self.shares)

    @property
    def is_on(self) -> bool:
        """Whether values of any variables lie in host memory between steps."""
        return self.streams or bool(self._held)

    def share(self, is_state: bool) -> float:
        """Return how much streams of the bytes that only updates read, or of those that others read, too."""
        return self.shares[0] if is_state else self.shares[1]

    def take_more(self, wanted: int, streamable: Mapping[bool, int]) -> bool:
        """Have more variables stream, if the configuration leaves that open.

        Args:
            wanted: How many bytes more.
            streamable: The bytes of each kind that can stream.

        Returns:
            Whether there were any: False where none are left, or values cannot lie in host memory here.
        """
        before = self.shares
        for is_state in KINDS:
            now, nbytes = self.share(is_state), streamable.get(is_state, 0)
            if wanted > 0 and nbytes and self._is_open(is_state) and self._can_hold():
                shares = HOST_SHARES[is_state]
                taken = next((one for one in shares if one > now and (one - now) * nbytes >= wanted), 1.0)
                self.shares = (taken, self.shares[1]) if is_state else (self.shares[0], taken)
                wanted -= int((taken - now) * nbytes)
        return self.shares != before

    def _can_hold(self) -> bool:
        """Tell whether values can lie in host memory here."""
        try:
            self.values()
        except LMSError as error:
            self.obstacle = str(error)
            return False
        return True

    def wants_new(self, handle: Any, *, trainable: bool) -> bool:
        """Tell whether the first value of a variable goes to the host, before a step shows who reads it."""
        nbytes = _nbytes(handle)
        if nbytes < max(1, self._config.min_tensor_bytes):
            return False
        if self._goes(trainable):
            return (self._is_asked(trainable) or self._can_hold()) and self.values().takes(handle)
        is_open = self._is_open(is_state=not trainable) and not self.has_room(handle, INITIALISED * nbytes)
        return is_open and self._can_hold() and self.values().takes(handle)

    def _goes(self, trainable: bool) -> bool:
        """Tell whether all first values of a kind go to the host; who reads them is not known yet."""
        return self.shares[1] == 1 if trainable else max(self.shares) == 1

    def _is_asked(self, trainable: bool) -> bool:
        """Tell whether somebody wants values of this kind on the host: else they go where there is room."""
        names = ("variables",) if trainable else KINDS.values()
        return any(getattr(self._config, name) == "host" for name in names)

    def lacking_bytes(self, inputs: Sequence[Any], streamed: Collection[int]) -> int:
        """Return what devices lack for a step's variables whose first values found no room there.

        Args:
            inputs: What the step's function is called with.
            streamed: The numbers of those inputs that stream.
        """
        others = [one for number, one in enumerate(inputs) if number not in streamed]
        kept: dict[str, list[Any]] = {}
        for handle in variable_handles(others):
            if self.holds(handle) and id(handle) in self._without_room:
                kept.setdefault(handle.device, []).append(handle)
        rooms = [(sum(map(_nbytes, handles)), self._room(handles[0])) for handles in kept.values()]
        return sum(max(0, nbytes - room) for nbytes, room in rooms if room is not None)

    def bring_back(self, is_planned: Callable[[str], bool]) -> list[int]:
        """Move all first values to the device that found no room there, as far as there is some now.

        Args:
            is_planned: Whether a device name is that of the device.

        Returns:
            The bytes of each that is still in host memory.
        """
        left = []
        for key in list(self._without_room):
            known = self._held.get(key)
            handle = known() if known is not None else None
            if handle is not None and is_planned(handle.device):
                self._fetch(handle)
                left += [_nbytes(handle)] if self.holds(handle) else []
        return left

    def holds(self, handle: Any) -> bool:
        """Tell whether values of a variable belong in host memory."""
        known = self._held.get(id(handle))
        return known is not None and known() is handle

    def put(self, handle: Any, value: Any) -> None:
        """Give a variable a value in host memory, and remember that it lies there."""
        self.values().put(handle, value)
        self.sent += 1
        self._remember(handle)

    def offer(self, handle: Any, value: Any, *, trainable: bool) -> bool:
        """Give a variable a value in host memory; return False where that is full and nobody asked for it."""
        is_first = not self.holds(handle)
        try:
            self.put(handle, value)
        except StoreError:
            if self._is_asked(trainable) or not is_first:
                raise
            return False
        if is_first and not self._goes(trainable):
            self._without_room.add(id(handle))
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
                    if number in streamed:
                        self._without_room.discard(id(handle))
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
        self._without_room.discard(key)

    def _is_open(self, is_state: bool) -> bool:
        return getattr(self._config, KINDS[is_state]) == "auto" and self.share(is_state) < 1


def _nbytes(handle: Any) -> int:
    return static_bytes(value_shape(handle), value_type(handle))
