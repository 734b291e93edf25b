"""GPUs as NVIDIA's management library knows them; imported only where a driver is loaded."""

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from launch.idset import IdSet


@dataclass(frozen=True)
class NvmlGpu:
    """What NVML says of one GPU; None or empty is unknown. ``pci_bus_id`` is as NVML writes it."""

    pci_bus_id: str
    name: str | None = None
    uuid: str | None = None
    memory_bytes: int | None = None
    near_cpus: IdSet = frozenset()
    mig: bool = False


def import_nvml() -> ModuleType | None:
    """The module of nvidia-ml-py, or None where it is not installed."""
    try:
        import pynvml
    except ImportError:
        return None
    return pynvml  # type: ignore[no-any-return]


def read_nvml(nvml: Any, cpu_count: int) -> tuple[tuple[NvmlGpu, ...], tuple[str, ...]]:
    """Ask NVML for all GPUs; it ignores CUDA_VISIBLE_DEVICES.

    Args:
        nvml: The module ``pynvml``, or something with its functions.
        cpu_count: The highest CPU id plus one, to size affinity masks.

    Returns:
        The GPUs in NVML's order and warnings; no GPUs when NVML does not work here.
    """
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return (), (f"NVML does not work here ({error}): GPUs are taken from /proc and /sys",)
    try:
        gpus, warnings = [], []
        for index in range(nvml.nvmlDeviceGetCount()):
            # One GPU that has fallen off the bus must not hide the others.
            try:
                gpus.append(_read_gpu(nvml, nvml.nvmlDeviceGetHandleByIndex(index), cpu_count))
            except nvml.NVMLError as error:
                warnings.append(f"NVML cannot read GPU {index} ({error}): it is left out")
        return tuple(gpus), tuple(warnings)
    except nvml.NVMLError as error:
        return (), (f"NVML cannot count the GPUs ({error}): they are taken from /proc and /sys",)
    finally:
        nvml.nvmlShutdown()


def _read_gpu(nvml: Any, handle: Any, cpu_count: int) -> NvmlGpu:
    def ask(question: Callable[[], Any]) -> Any:
        """The answer, or None where this GPU or this version of NVML has none."""
        try:
            return question()
        except (nvml.NVMLError, AttributeError):
            return None

    words = ask(lambda: nvml.nvmlDeviceGetCpuAffinity(handle, (cpu_count + 63) // 64))
    mig = ask(lambda: nvml.nvmlDeviceGetMigMode(handle))
    return NvmlGpu(
        pci_bus_id=_text(nvml.nvmlDeviceGetPciInfo(handle).busId) or "",
        name=_text(ask(lambda: nvml.nvmlDeviceGetName(handle))),
        uuid=_text(ask(lambda: nvml.nvmlDeviceGetUUID(handle))),
        # Where the GPU's memory is a NUMA node of the kernel, NVML has no figure of its own.
        memory_bytes=ask(lambda: int(nvml.nvmlDeviceGetMemoryInfo(handle).total)) or None,
        near_cpus=_ids_of_words(words or ()),
        mig=bool(mig and mig[0]),
    )


def _text(value: Any) -> str | None:
    """Text, which older versions of nvidia-ml-py give as bytes."""
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return None if value is None else str(value)


def _ids_of_words(words: Any) -> IdSet:
    return frozenset(
        position * 64 + bit
        for position, word in enumerate(words)
        for bit in range(64)
        if int(word) >> bit & 1
    )
