"""A strict stand-in for IBM's patched TensorFlow 2.1: it refuses what the real one refuses.

``FAKE_GPUS`` sets how many GPUs it lists; ``FAKE_STOCK=1`` takes the patch away.
"""

import os
import sys

__version__ = "2.1.0"


class PhysicalDevice:
    def __init__(self, name: str) -> None:
        self.name = name
        self.device_type = "GPU"


class _Context:
    """What the real context keeps; settings are fixed once the devices exist."""

    def __init__(self) -> None:
        self.initialized = False
        self.lms_enabled = False
        self.lms_defrag_enabled = False
        self.gpus = [
            PhysicalDevice(f"/physical_device:GPU:{index}")
            for index in range(int(os.environ.get("FAKE_GPUS", "0")))
        ]
        self.visible = list(self.gpus)
        self.growing = []  # type: list[PhysicalDevice]

    def require_fresh(self, what: str) -> None:
        if self.initialized:
            raise RuntimeError(f"{what} must be set before GPUs have been initialized")

    def known(self, device: PhysicalDevice) -> PhysicalDevice:
        if device not in self.gpus:
            raise ValueError(f"Unrecognized device: {device!r}")
        return device


context = _Context()


def _boolean(value: bool) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"expected bool, got {value!r}")
    return value


class _Experimental:
    @staticmethod
    def set_lms_enabled(enabled: bool) -> None:
        context.require_fresh("Large model support")
        context.lms_enabled = _boolean(enabled)

    @staticmethod
    def get_lms_enabled() -> bool:
        return context.lms_enabled

    @staticmethod
    def set_lms_defrag_enabled(enabled: bool) -> None:
        context.require_fresh("Large model support defragmentation")
        context.lms_defrag_enabled = _boolean(enabled)

    @staticmethod
    def get_lms_defrag_enabled() -> bool:
        return context.lms_defrag_enabled

    @staticmethod
    def set_memory_growth(device: PhysicalDevice, enable: bool) -> None:
        context.require_fresh("Memory growth")
        if _boolean(enable):
            context.growing.append(context.known(device))


class _Config:
    experimental = _Experimental

    @staticmethod
    def list_physical_devices(device_type: str) -> "list[PhysicalDevice]":
        return list(context.gpus) if device_type == "GPU" else []

    @staticmethod
    def set_visible_devices(devices: "list[PhysicalDevice]", device_type: str) -> None:
        context.require_fresh("Visible devices")
        if device_type != "GPU":
            raise ValueError(f"Invalid device type: {device_type}")
        context.visible = [context.known(device) for device in devices]


config = _Config

if os.environ.get("FAKE_STOCK"):
    for name in ("lms_enabled", "lms_defrag_enabled"):
        delattr(_Experimental, f"set_{name}")
        delattr(_Experimental, f"get_{name}")


def constant(value: float) -> float:
    """The first tensor makes the devices."""
    context.initialized = True
    return value


from tensorflow.core.protobuf.config_pb2 import ConfigProto  # noqa: E402
from tensorflow.python.client.session import Session  # noqa: E402

sys.modules[__name__].Session = Session  # type: ignore[attr-defined]
__all__ = ["ConfigProto", "Session", "config", "constant", "context"]
