"""Choose the transport for a configuration and a device."""

from collections.abc import Mapping
from pathlib import Path

import tensorflow as tf

from lms.config import LMSConfig
from lms.errors import BuildError, PlaceError
from lms.transports.base import Transport
from lms.transports.device import DeviceTransport
from lms.transports.host import MIB, HostTransport
from lms.transports.pyfunc import NumpyTransport
from lms.user_files import require_folder

NO_GPU = "transport is 'device' and no GPU is visible; needed 'host', 'file', 'numpy' or 'auto'"


def require_store(config: LMSConfig) -> None:
    """Check the configured transport and store, as far as that is possible without a device.

    Raises:
        PlaceError: If ``transport`` and ``store_dir`` cannot be had.
    """
    if config.store_dir:
        require_folder(Path(config.store_dir), "store_dir (LMS_STORE)")
    if config.transport == "file" and not config.store_dir:
        raise PlaceError("transport is 'file' without store_dir; set LMS_STORE to a folder on a local disk")
    if config.transport == "device" and not tf.config.list_physical_devices("GPU"):
        raise PlaceError(NO_GPU)


def choose_transport(config: LMSConfig, device_type: str, environ: Mapping[str, str]) -> Transport:
    """Return the transport that ``config`` asks for, or the best one for ``device_type``.

    ``device_type`` is ``GPU`` or ``CPU``. ``store_dir`` is a further tier behind host memory: what exceeds
    ``host_mem_limit_mb`` goes there; without a limit, or with ``transport="file"``, everything does. This
    also holds for a GPU: TensorFlow's own copies go as far as the host, and the store takes over there.

    Raises:
        PlaceError: If the transport does not fit the device, or its store cannot be made.
    """
    kind = config.transport
    if kind == "auto":
        kind = "file" if config.store_dir else "device" if device_type == "GPU" else "host"
    if kind == "device":
        if device_type != "GPU":
            raise PlaceError(NO_GPU)
        return DeviceTransport(environ)
    require_store(config)
    if kind == "numpy":
        return NumpyTransport()
    memory = None if config.host_mem_limit_mb is None else config.host_mem_limit_mb * MIB
    if config.store_dir and (config.transport == "file" or memory is None):
        memory = 0
    store_dir = Path(config.store_dir) if config.store_dir else None
    try:
        return HostTransport(environ, store_dir, memory)
    except BuildError as error:
        if store_dir is not None:
            raise
        return NumpyTransport(f"swapping through NumPy, which is slower: {error}")
