"""What already runs on a host, from its /proc and from NVML."""

from types import SimpleNamespace
from typing import Any

import pytest

from launch.discover.tree import MemoryTree
from launch.model.busy import GpuUse
from launch.preflight.occupancy import Occupancy, read_occupancy


def environ(**variables: str) -> bytes:
    return b"".join(f"{name}={value}".encode() + b"\0" for name, value in variables.items())


def test_other_jobs_of_lmsrun_are_counted_by_job_and_rank() -> None:
    tree = MemoryTree(
        {
            "proc/loadavg": b"7.50 3.00 1.00 5/321 4711\n",
            "proc/10/environ": environ(PATH="/bin", LMSRUN_JOB_ID="j1", RANK="0"),
            "proc/11/environ": environ(LMSRUN_JOB_ID="j1", RANK="0"),  # a child of rank 0
            "proc/12/environ": environ(LMSRUN_JOB_ID="j1", RANK="1"),
            "proc/13/environ": environ(LMSRUN_JOB_ID="j2", RANK="0"),
            "proc/14/environ": environ(LMSRUN_JOB_ID="own", RANK="0"),
            "proc/15/environ": environ(LMSRUN_JOB_ID="j3"),  # a launcher, no rank
            "proc/16/environ": b"\xff\xfe=\0RANK=1",
            "proc/self/environ": environ(LMSRUN_JOB_ID="j9", RANK="0"),
        },
        {},
    )
    assert read_occupancy(tree, {"LMSRUN_JOB_ID": "own"}, None) == Occupancy(4.0, 2, 3)


@pytest.mark.parametrize(
    ("text", "load"),
    [("", None), ("x y z 1/2 3", None), ("0.10 0 0 9/321 1", 0.1), ("9.00 0 0 1/321 1", 0.0)],
)
def test_a_load_of_the_past_is_none_now(text: str, load: float | None) -> None:
    tree = MemoryTree({"proc/loadavg": text.encode()}, {})
    assert read_occupancy(tree, {}, None).load == load


class NvmlError(Exception):
    """As ``pynvml.NVMLError``."""


def fake_nvml(gpus: list[dict[str, Any]], **changes: Any) -> SimpleNamespace:
    def ask(what: str) -> Any:
        def answer(gpu: dict[str, Any]) -> Any:
            if gpu[what] is None:
                raise NvmlError(what)
            return gpu[what]

        return answer

    functions = {
        "NVMLError": NvmlError,
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: len(gpus),
        "nvmlDeviceGetHandleByIndex": lambda index: gpus[index],
        "nvmlDeviceGetPciInfo": ask("pci"),
        "nvmlDeviceGetComputeRunningProcesses": ask("processes"),
        "nvmlDeviceGetMemoryInfo": ask("memory"),
    }
    return SimpleNamespace(**{**functions, **changes})


def gpu(address: str | bytes, processes: int | None, used: int, total: int = 1000) -> dict[str, Any]:
    return {
        "pci": SimpleNamespace(busId=address),
        "processes": None if processes is None else [object()] * processes,
        "memory": SimpleNamespace(used=used, total=total),
    }


def test_gpus_that_somebody_computes_on() -> None:
    nvml = fake_nvml(
        [
            gpu(b"00000000:04:00.0", 2, 50),
            gpu("00000000:05:00.0", 0, 10),  # idle; the driver's own
            gpu("00000000:06:00.0", 0, 500),  # another container's process is not listed
            gpu("00000000:07:00.0", None, 900),  # fallen off the bus
            gpu("nonsense", 1, 900),
        ]
    )
    assert read_occupancy(MemoryTree({}, {}), {}, nvml).gpus == (
        GpuUse("0000:04:00.0", 50, 2),
        GpuUse("0000:06:00.0", 500, 0),
    )


def fail() -> None:
    raise NvmlError


@pytest.mark.parametrize("function", ["nvmlInit", "nvmlDeviceGetCount"])
def test_nvml_that_does_not_work_says_nothing(function: str) -> None:
    assert read_occupancy(MemoryTree({}, {}), {}, fake_nvml([], **{function: fail})).gpus == ()


def test_nvml_that_cannot_end_has_still_answered() -> None:
    nvml = fake_nvml([gpu("00000000:04:00.0", 1, 50)], nvmlShutdown=fail)
    assert read_occupancy(MemoryTree({}, {}), {}, nvml).gpus == (GpuUse("0000:04:00.0", 50, 1),)
