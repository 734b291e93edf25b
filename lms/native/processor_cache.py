"""Tell the size of the processor's largest cache, by which TensorFlow's own kernels share their work out."""

import ctypes
import functools
import os
from contextlib import suppress
from pathlib import Path

from lms.native.prebuilt import find_prebuilt

SOURCE = Path(__file__).resolve().with_name("cache.c")
LINUX = Path("/sys/devices/system/cpu/cpu0/cache")
QUERIED_MACHINE = "x86_64"
"""The only machine on which Eigen asks the processor (``Eigen/src/Core/util/Memory.h``)."""
DEFAULT_L3_BYTES = {"x86_64": 2 << 20, "ppc64le": 4 << 20}
"""The bytes by machine that Eigen takes where the processor does not tell (``GeneralBlockPanelKernel.h``)."""
OTHER_L3_BYTES = 512 << 10
"""The same on any other machine."""


@functools.cache
def read_l3_bytes() -> int:
    """Return the bytes of the cache of the third level, as Eigen finds them."""
    machine = os.uname().machine
    asked = ask_processor(SOURCE) if machine == QUERIED_MACHINE else 0
    return told_or_default(machine, ask_linux(LINUX) if asked is None else asked)


def told_or_default(machine: str, told: int) -> int:
    """Return what the processor of a machine tells, or Eigen's default where that is 0."""
    return told or DEFAULT_L3_BYTES.get(machine, OTHER_L3_BYTES)


def ask_processor(source: Path) -> int | None:
    """Return what the processor tells Eigen; ``None`` where ``source`` was not built with the package."""
    for path in find_prebuilt(source):
        with suppress(OSError, AttributeError):
            call = ctypes.CDLL(str(path)).lms_l3_bytes
            call.restype = ctypes.c_int64
            return int(call())
    return None


def ask_linux(folder: Path) -> int:
    """Return what Linux tells, or 0; of AMD's processors it is the part of the cache that one core uses."""
    for one in sorted(folder.glob("index*")):
        with suppress(OSError, ValueError):
            if (one / "level").read_text().strip() == "3":
                return int((one / "size").read_text().strip().removesuffix("K")) << 10
    return 0
