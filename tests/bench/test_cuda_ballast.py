"""A ballast in a GPU's memory, with a driver that refuses what CUDA's refuses."""

import ctypes
from typing import Any

import pytest

GIB = 1 << 30
INVALID_VALUE, OUT_OF_MEMORY, NOT_INITIALIZED, NO_DEVICE, INVALID_CONTEXT = 1, 2, 3, 100, 201


class Driver:
    """In the place of ``libcuda.so.1``: one GPU with some free memory."""

    def __init__(self, free: int) -> None:
        self.free = free
        self.is_ready = self.has_context = False
        self._retained = ctypes.c_void_p()

    def cuInit(self, flags: Any) -> int:  # noqa: N802 - the driver's name
        self.is_ready = flags.value == 0
        return 0 if self.is_ready else INVALID_VALUE

    def cuDeviceGet(self, device: Any, ordinal: Any) -> int:  # noqa: N802
        if not self.is_ready:
            return NOT_INITIALIZED
        if ordinal.value:
            return NO_DEVICE
        device._obj.value = 7
        return 0

    def cuDevicePrimaryCtxRetain(self, context: Any, device: Any) -> int:  # noqa: N802
        if device.value != 7:
            return NO_DEVICE
        context._obj.value = self._retained.value = 0x1000
        return 0

    def cuCtxSetCurrent(self, context: Any) -> int:  # noqa: N802
        self.has_context = context.value == self._retained.value
        return 0 if self.has_context else INVALID_CONTEXT

    def cuMemGetInfo_v2(self, free: Any, total: Any) -> int:  # noqa: N802
        if not self.has_context:
            return INVALID_CONTEXT
        free._obj.value, total._obj.value = self.free, 80 * GIB
        return 0

    def cuMemAlloc_v2(self, pointer: Any, nbytes: Any) -> int:  # noqa: N802
        if not self.has_context:
            return INVALID_CONTEXT
        if not 0 < nbytes.value <= self.free:
            return OUT_OF_MEMORY if nbytes.value else INVALID_VALUE
        assert isinstance(pointer._obj, ctypes.c_uint64) and isinstance(nbytes, ctypes.c_size_t)
        self.free -= nbytes.value
        return 0


@pytest.fixture
def driver(bench_path: None, monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver(79 * GIB)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: made if name == "libcuda.so.1" else None)
    return made


def test_a_ballast_leaves_a_limit_and_room_for_the_context(driver: Driver) -> None:
    from cuda_ballast import CONTEXT_BYTES, leave_free

    assert leave_free(8 * GIB) == 71 * GIB - CONTEXT_BYTES
    assert driver.free == 8 * GIB + CONTEXT_BYTES
    assert leave_free(8 * GIB) == 0, "nothing more has to be taken"


@pytest.mark.parametrize(
    ("limit", "ordinal", "text"),
    [
        (79 * GIB, 0, "found 79.0 GiB free on the GPU; needed 80.0"),
        (8 * GIB, 1, "cuDeviceGet of CUDA's driver failed with 100"),
    ],
)
def test_a_ballast_that_cannot_be_taken(driver: Driver, limit: int, ordinal: int, text: str) -> None:
    from cuda_ballast import DriverError, leave_free

    with pytest.raises(DriverError, match=f"^{text}$"):
        leave_free(limit, ordinal)


def test_no_driver(bench_path: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from cuda_ballast import DriverError, leave_free

    def missing(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    with pytest.raises(DriverError, match=r"^found no libcuda\.so\.1 .*; needed NVIDIA's driver$"):
        leave_free(GIB)


def test_unified_memory_is_asked_of_tensorflow(bench_path: None) -> None:
    import subprocess
    import sys
    from pathlib import Path

    code = (
        "import tensorflow as tf, lms_case\n"
        "from tensorflow.python.eager import context\n"
        "lms_case._set_options("
        "lambda found: setattr(found.gpu_options.experimental, 'use_unified_memory', True))\n"
        "assert context.context().config.gpu_options.experimental.use_unified_memory\n"
        "print(float(tf.reduce_sum(tf.ones(3))))\n"
    )
    bench = Path(__file__).resolve().parents[2] / "bench"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=bench, capture_output=True, text=True, check=False
    )
    assert done.stdout == "3.0\n", done.stderr[-2000:]
