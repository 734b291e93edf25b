"""Tell the size of the processor's largest cache, by which TensorFlow's own kernels share their work out."""

import ctypes
import functools
import os
from contextlib import suppress
from pathlib import Path

from lms.native.prebuilt import find_prebuilt

SOURCE = Path(__file__).resolve().with_name("cache.c")
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
ASKED = "x86_64"
"""The only machine on which Eigen asks the processor (``Eigen/src/Core/util/Memory.h``)."""
UNTOLD = {"x86_64": 2 << 20, "ppc64le": 4 << 20}
"""The bytes by machine that Eigen takes where the processor does not tell (``GeneralBlockPanelKernel.h``)."""
UNTOLD_ELSEWHERE = 512 << 10


@functools.cache
def l3_bytes() -> int:
    """Return the bytes of the third level's cache, as Eigen finds them.

    Without a C compiler it is what Linux says, which is less on processors of AMD.
    """
    machine = os.uname().machine
    untold = UNTOLD.get(machine, UNTOLD_ELSEWHERE)
    return (_asked() or _read(CACHES) or untold) if machine == ASKED else untold


def _asked() -> int:
    """Return what the processor tells, or 0."""
    for path in find_prebuilt(SOURCE):
        with suppress(OSError, AttributeError):
            call = ctypes.CDLL(str(path)).lms_l3_bytes
            call.restype = ctypes.c_int64
            return int(call())
    return 0


def _read(folder: Path) -> int:
    """Return what Linux tells of a processor's cache, or 0."""
    for one in sorted(folder.glob("index*")):
        with suppress(OSError, ValueError):
            if (one / "level").read_text().strip() == "3":
                return int((one / "size").read_text().strip().removesuffix("K")) << 10
    return 0
