"""Find the measured times of steps that were kept on this machine."""

import os
import platform
from collections.abc import Callable, Mapping
from pathlib import Path

import tensorflow as tf

from lms.device.device import Device
from lms.device.link_speed import model_name
from lms.profiling.store import Profiles, profile_folder

CPU_INFO = Path("/proc/cpuinfo")


def profiles_of(device: Device, environ: Mapping[str, str], warn: Callable[[str], None]) -> Profiles:
    """Return the profiles of this machine's device."""
    machine = _host() if device.type == "CPU" else _gpu(device)
    return Profiles(profile_folder(environ), (device.name, *machine, f"TensorFlow {tf.__version__}"), warn)


def _host() -> tuple[str, ...]:
    """Return what the times of the CPU device depend on."""
    intra = tf.config.threading.get_intra_op_parallelism_threads()
    inter = tf.config.threading.get_inter_op_parallelism_threads()
    cpus = len(os.sched_getaffinity(0))
    return _processor(), f"{cpus} CPUs", f"{intra} and {inter} threads"


def _gpu(device: Device) -> tuple[str, ...]:
    """Return what the times of a GPU depend on."""
    tf32 = tf.config.experimental.tensor_float_32_execution_enabled()
    return model_name(device), f"capability {device.capability}", f"TF32 {tf32}"


def _processor() -> str:
    """Return the model of the processor, or its architecture where the kernel tells no more."""
    try:
        lines = CPU_INFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "cpu\t")))
    return next(named, platform.machine())
