"""Swapping on the CPU device: a small C++ op moves bytes out of TensorFlow's allocator."""

import ctypes
import os
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lms.errors import StoreError
from lms.native.build import HOST_STORE
from lms.native.library import load_library
from lms.transports.base import StoreStats, host_beside, write_copy

_STATS = 10
_TOTALS = ("swap_outs", "swap_ins", "bytes_out", "bytes_in", "seconds_out", "seconds_in")
"""Figures that only grow; told since the transport was made."""
MIB = 1 << 20


class HostTransport:
    """Memory of the process up to ``memory_limit_bytes``, then an unlinked file in ``store_dir``.

    Its ops run on the host. From a GPU TensorFlow itself copies to it and back.

    Args:
        environ: Where the cache of built ops is looked up.
        store_dir: Directory on a local disk; ``None`` is memory alone.
        memory_limit_bytes: Memory the store may take; ``None`` is no limit, 0 sends everything to the file.
        page_bytes: Blocks are multiples of it; ``None`` is the system's page. A larger one is for trying
        what a machine with larger pages does.

    Raises:
        BuildError: If the op cannot be compiled or loaded.
        StoreError: If the file cannot be made in ``store_dir``.
    """

    note: str | None = None
    counts = True
    in_regions = False

    def __init__(
        self,
        environ: Mapping[str, str],
        store_dir: Path | None = None,
        memory_limit_bytes: int | None = None,
        page_bytes: int | None = None,
    ) -> None:
        library = load_library(HOST_STORE, environ)
        self._calls, self._ops = library.calls, library.ops
        self._store_dir, self._memory_limit = store_dir, memory_limit_bytes
        self.name = "host" if store_dir is None else "file"
        limit = -1 if memory_limit_bytes is None else memory_limit_bytes
        directory = None if store_dir is None else os.fsencode(store_dir)
        failed = self._calls.lms_store_configure(
            ctypes.c_int64(limit), directory, ctypes.c_int64(page_bytes or 0)
        )
        if failed:
            raise StoreError(
                f"cannot make a file in {store_dir}: {os.strerror(failed)}; set LMS_STORE to another one"
            )
        self._start = self._read()

    def room_bytes(self) -> int | None:
        """Return the bytes that memory and disk together can hold; ``None`` for memory without a limit."""
        if self._store_dir is None:
            return self._memory_limit
        return (self._memory_limit or 0) + shutil.disk_usage(self._store_dir).free + self.stats().file_bytes

    def require_room(self, nbytes: int) -> None:
        """Check that memory and disk together can hold ``nbytes``."""
        room = self.room_bytes()
        if room is not None and nbytes > room:
            where = f"in {self._store_dir}" if self._store_dir else "under the host memory limit"
            raise StoreError(
                f"one step swaps {nbytes / MIB:.0f} MiB and {room / MIB:.0f} MiB are free {where}; "
                "free some space, set LMS_STORE to a larger disk, raise host_mem_limit_mb, use less batch, "
                "or recompute='auto' where it is off"
            )

    def write_swap_out(self, node: Any, tensor: str, dtype: int, device: str) -> None:
        """Make ``node`` the op that copies a tensor into the store."""
        write_copy(node, "LmsSwapOut", tensor, dtype, host_beside(device))

    def write_swap_in(self, node: Any, held: str, dtype: int, device: str) -> None:
        """Make ``node`` the op that copies a tensor back out of the store."""
        write_copy(node, "LmsSwapIn", held, dtype, host_beside(device))

    def hold(self, value: Any) -> Any:
        """Return a tensor with the same values in the store, where it counts as no memory of the device."""
        return self._ops.lms_swap_out(value)

    def fetch(self, held: Any) -> Any:
        """Return a tensor with the same values on the device."""
        return self._ops.lms_swap_in(held)

    def holds(self, address: int | None) -> bool:
        """Tell whether a tensor's memory, by its address, is the store's."""
        return bool(address) and bool(self._calls.lms_store_holds(ctypes.c_void_p(address)))

    def stats(self) -> StoreStats:
        """Return the store's figures; totals count from when this transport was made."""
        now, start = self._read(), self._start
        moved = {name: getattr(now, name) - getattr(start, name) for name in _TOTALS}
        return replace(now, **moved)

    def _read(self) -> StoreStats:
        """Read the store's own figures; the process has one store, so they count earlier users too."""
        values = (ctypes.c_int64 * _STATS)()
        self._calls.lms_store_stats(values)
        in_use, peak, memory, file, outs, ins, bytes_out, bytes_in, ns_out, ns_in = values
        return StoreStats(
            in_use, peak, memory, file, outs, ins, bytes_out, bytes_in, ns_out / 1e9, ns_in / 1e9
        )
