"""GPUs as NVIDIA's management library knows them; imported only where a driver is loaded."""

from dataclasses import replace
from types import ModuleType
from typing import Any

from launch.discover.gpus import MIG, GpuFacts, parse_pci_address
from launch.model.idset import IdSet


def import_nvml() -> ModuleType | None:
    """Import the module of nvidia-ml-py; None where it is not installed."""
    try:
        import pynvml
    except ImportError:
        return None
    return pynvml  # type: ignore[no-any-return]


def read_nvml(nvml: Any, cpu_count: int) -> tuple[tuple[GpuFacts, ...], tuple[str, ...]]:
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
        return _read_gpus(nvml, cpu_count)
    except nvml.NVMLError as error:
        return (), (f"NVML cannot count the GPUs ({error}): they are taken from /proc and /sys",)
    finally:
        _ask(nvml, "nvmlShutdown")


def _read_gpus(nvml: Any, cpu_count: int) -> tuple[tuple[GpuFacts, ...], tuple[str, ...]]:
    gpus, warnings = [], []
    for index in range(nvml.nvmlDeviceGetCount()):
        # One GPU that has fallen off the bus must not hide the others.
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            address = parse_pci_address(_text(nvml.nvmlDeviceGetPciInfo(handle).busId) or "")
        except nvml.NVMLError as error:
            warnings.append(f"NVML cannot read GPU {index} ({error}): it is left out")
            continue
        if address is not None:
            whole = _read_gpu(nvml, handle, address, cpu_count)
            mig = _ask(nvml, "nvmlDeviceGetMigMode", handle)
            if not (mig and mig[0]):
                gpus.append(whole)
                continue
            parts = _read_mig_devices(nvml, handle, whole)
            gpus += parts
            if not parts:
                warnings.append(f"GPU {address} is in MIG mode without a MIG device: it is left out")
    return tuple(gpus), tuple(warnings)


def _read_gpu(nvml: Any, handle: Any, address: str, cpu_count: int) -> GpuFacts:
    memory = _ask(nvml, "nvmlDeviceGetMemoryInfo", handle)
    return GpuFacts(
        address,
        "nvidia",
        name=_text(_ask(nvml, "nvmlDeviceGetName", handle)),
        uuid=_text(_ask(nvml, "nvmlDeviceGetUUID", handle)),
        # Where the GPU's memory is a NUMA node of the kernel, NVML has no figure of its own.
        memory_bytes=int(memory.total) or None if memory else None,
        near_cpus=_ids_of_words(_ask(nvml, "nvmlDeviceGetCpuAffinity", handle, (cpu_count + 63) // 64) or ()),
    )


def _read_mig_devices(nvml: Any, handle: Any, whole: GpuFacts) -> list[GpuFacts]:
    """Read the MIG devices of a GPU, each a GPU to CUDA; the whole one is none while it is in MIG mode."""
    found = []
    for index in range(_ask(nvml, "nvmlDeviceGetMaxMigDeviceCount", handle) or 0):
        part = _ask(nvml, "nvmlDeviceGetMigDeviceHandleByIndex", handle, index)
        uuid = _text(_ask(nvml, "nvmlDeviceGetUUID", part)) if part is not None else None
        if uuid is None or not uuid.startswith(MIG):
            continue
        memory = _ask(nvml, "nvmlDeviceGetMemoryInfo", part)
        size = int(memory.total) or None if memory else None
        found.append(replace(whole, uuid=uuid, memory_bytes=size))
    return found


def _ask(nvml: Any, function: str, *arguments: Any) -> Any:
    """Ask NVML by the function's name; None where that fails, or this GPU or this NVML has no answer."""
    try:
        return getattr(nvml, function)(*arguments)
    except (nvml.NVMLError, AttributeError):
        return None


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
