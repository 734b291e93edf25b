"""Picks the transport for a configuration and a device."""

from collections.abc import Mapping
from pathlib import Path

from lms.config import LMSConfig
from lms.errors import BuildError, LMSError
from lms.transports.base import Transport
from lms.transports.device import DeviceTransport
from lms.transports.host import MIB, HostTransport
from lms.transports.pyfunc import NumpyTransport


def choose_transport(config: LMSConfig, device_type: str, environ: Mapping[str, str]) -> Transport:
    """The transport that ``config`` asks for, or the best one for ``device_type`` (``GPU`` or ``CPU``).

    ``store_dir`` is a further tier behind host memory: what exceeds ``host_mem_limit_mb`` goes there;
    without a limit, or with ``transport="file"``, everything does.

    Raises:
        LMSError: If the transport does not fit the device, or its store cannot be made.
    """
    kind = config.transport
    if kind == "auto":
        kind = "device" if device_type == "GPU" else "file" if config.store_dir else "host"
    if kind == "device":
        if device_type != "GPU":
            raise LMSError(
                "transport is 'device' and no GPU is visible; needed 'host', 'file', 'numpy' or 'auto'"
            )
        return DeviceTransport()
    if kind == "file" and not config.store_dir:
        raise LMSError("transport is 'file' without store_dir; set LMS_STORE to a directory on a local disk")
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
