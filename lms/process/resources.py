"""Hold what an engine uses of its process: devices, transport, measured times, fillers, host values."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from lms.config import LMSConfig
from lms.device.device import Device, read_devices
from lms.device.horovod_fusion_buffer import FusionBuffer
from lms.device.memory_pool import PoolClaim, Rooms
from lms.device.own_ops import load_assignment, load_filler
from lms.errors import BuildError
from lms.process.machine_profiles import profiles_of
from lms.process_state import tensorflow_is_initialised
from lms.profiling.store import Profiles
from lms.transports.base import Transport
from lms.transports.choose import choose_transport
from lms.variables.host_values import HostValues, host_values
from lms.variables.on_host import HostVariables

logger = logging.getLogger("lms")


class Resources:
    """The devices of a process and what moves bytes to and from them, read or made when first needed.

    Args:
        config: What was asked for.
        environ: The process's variables.
        warn: Warns, once of each text.
    """

    def __init__(self, config: LMSConfig, environ: Mapping[str, str], warn: Callable[[str], None]) -> None:
        self._config, self._environ, self._warn = config, environ, warn
        self.pool = PoolClaim(environ)
        self.fusion = FusionBuffer(environ, self.pool.leaves_growing, late=tensorflow_is_initialised())
        self.host = HostVariables(config, self._host_values, self._room)
        self.rooms = Rooms()
        self._devices: tuple[Device, ...] = ()
        self._assumed_limit: int | None = None
        self._transport: Transport | None = None
        self._values: HostValues | None = None
        self._profiles: Profiles | None = None
        self._loaded: dict[Callable[[Mapping[str, str]], None], bool] = {}
        """Whether each of the ops could be loaded, once that was asked; by what loads it."""

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices whose memory is planned, read when they are first needed."""
        if not self._devices:
            self._devices = read_devices(self._environ)
        if self._assumed_limit is not None:
            return tuple(replace(device, limit_bytes=self._assumed_limit) for device in self._devices)
        return self._devices

    def assume_limit(self, limit_bytes: int | None) -> None:
        """Plan for a device of ``limit_bytes`` in place of the real size; None: for the real one again."""
        self._assumed_limit = limit_bytes

    @property
    def assumes_limit(self) -> bool:
        """Whether plans are made for a device of another size than the real one's."""
        return self._assumed_limit is not None

    def profiles(self) -> Profiles:
        """Return the measured times of steps on this machine."""
        if self._profiles is None:
            self._profiles = profiles_of(self.devices[0], self._environ, self._warn)
        return self._profiles

    def load_fillers(self) -> bool:
        """Load the op of fillers, compiled when it is first needed; tell whether plans may have them.

        With several devices they may not: a buffer may be allocated on one at the point of an op of another.
        """
        return len(self.devices) == 1 and self._can(load_filler, "without fillers")

    def load_assignment(self) -> bool:
        """Load the op that assigns in place, compiled when it is first needed; tell whether it is there."""
        return self._can(load_assignment, "for variables that move in each step")

    def _can(self, load: Callable[[Mapping[str, str]], None], otherwise: str) -> bool:
        if load not in self._loaded:
            try:
                load(self._environ)
                self._loaded[load] = True
            except BuildError as error:
                logger.info("plans %s: %s", otherwise, error)
                self._loaded[load] = False
        return self._loaded[load]

    def transport(self) -> Transport:
        """Return the transport that moves swapped bytes; choose it when it is first needed."""
        if self._transport is None:
            self._transport = choose_transport(self._config, self.devices[0].type, self._environ)
            if self._transport.note:
                self._warn(self._transport.note)
        return self._transport

    @property
    def active_transport(self) -> Transport | None:
        """The transport, once something has been swapped."""
        return self._transport

    def _host_values(self) -> HostValues:
        """Return the way to have variables in host memory; choose it when it is first needed."""
        if self._values is None:
            self._values = host_values(self.transport(), self._environ)
        return self._values

    def _room(self, handle: Any) -> int | None:
        """Return the free bytes of its device beside its margin; ``None`` where they are not known."""
        device = next((one for one in self.devices if one.holds(handle.device)), None)
        memory = None if device is None else device.memory()
        if device is None or device.limit_bytes is None or memory is None:
            return None
        return int(device.limit_bytes * (1 - self._config.margin)) - memory[0]
