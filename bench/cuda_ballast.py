"""Takes a GPU's memory by CUDA's driver until only some of it is left: a large card acts as a small one.

TensorFlow's own limit does not do for unified memory: there all of the card holds pages of the limit's
process, and nothing is moved to the host before the card is full.
"""

import ctypes

CONTEXT_BYTES = 1 << 30
"""Left beside what a case may use: for the code of kernels, and what cuDNN and cuBLAS keep for themselves.
Without a kernel an H100's context takes about half of that."""


class DriverError(Exception):
    """CUDA's driver is not there, or refuses; the text says what was asked of it."""


def leave_free(nbytes: int, ordinal: int = 0) -> int:
    """Take memory of a GPU for the life of this process, but ``nbytes`` and :data:`CONTEXT_BYTES`.

    What is taken lies in the primary context of the device, which TensorFlow uses, too, and cannot be moved
    to the host.

    Args:
        nbytes: Bytes that stay free.
        ordinal: The GPU among those that are visible.

    Returns:
        The bytes that were taken.

    Raises:
        DriverError: If there is no driver, or less memory is free.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DriverError(f"found no libcuda.so.1 ({error}); needed NVIDIA's driver") from error
    device, context = ctypes.c_int(), ctypes.c_void_p()
    free, total, taken = ctypes.c_size_t(), ctypes.c_size_t(), ctypes.c_uint64()
    _call(driver, "cuInit", ctypes.c_uint(0))
    _call(driver, "cuDeviceGet", ctypes.byref(device), ctypes.c_int(ordinal))
    _call(driver, "cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    _call(driver, "cuCtxSetCurrent", context)
    _call(driver, "cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
    ballast = free.value - nbytes - CONTEXT_BYTES
    if ballast < 0:
        have, need = free.value / 2**30, (nbytes + CONTEXT_BYTES) / 2**30
        raise DriverError(f"found {have:.1f} GiB free on the GPU; needed {need:.1f}")
    if ballast:
        _call(driver, "cuMemAlloc_v2", ctypes.byref(taken), ctypes.c_size_t(ballast))
    return ballast


def _call(driver: ctypes.CDLL, name: str, *arguments: object) -> None:
    if code := getattr(driver, name)(*arguments):
        raise DriverError(f"{name} of CUDA's driver failed with {code}")
