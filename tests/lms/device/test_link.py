"""The speed of a device and its link: given, measured, or known of its generation."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lms.config import LMSConfig
from lms.simulate.cost_model import costs_of

ROOT = Path(__file__).resolve().parents[3]
CHILD = """
import json, os
import tensorflow as tf
from lms.device import link_speed
from lms.device.device import read_devices

known = link_speed.costs_of
link_speed.costs_of = lambda *device: known(*device).with_link(4.0123e9)  # no measured one
tf.config.set_visible_devices([], "GPU")
if os.environ["PROGRAM"] == "v1":
    tf.compat.v1.disable_eager_execution()
device, *_ = read_devices(os.environ)
kept = tf.zeros((20 << 20,)) if os.environ["PROGRAM"] == "full" else None
before = tf.config.experimental.get_memory_info("CPU:0")["current"]
rates = [link_speed.costs_of_device(device, rate).in_bytes_per_s / 1e9 for rate in (None, 7.5, 0)]
print(json.dumps([rates, tf.config.experimental.get_memory_info("CPU:0")["current"] - before]))
"""


@pytest.mark.parametrize(
    ("capability", "name", "machine", "gb_s"),
    [
        (None, "", "x86_64", 12),
        (6, "Tesla P100-PCIE-16GB", "x86_64", 12),
        (7, "Tesla V100-SXM2-32GB", "x86_64", 12),
        (7, "Tesla V100-SXM2-32GB", "ppc64le", 60),
        (8, "NVIDIA A100-SXM4-80GB", "x86_64", 24),
        (9, "NVIDIA H200", "x86_64", 55),
        (9, "NVIDIA GH200 480GB", "aarch64", 350),
        (12, "NVIDIA RTX PRO 6000", "x86_64", 55),
    ],
)
def test_links_known_of_a_generation(capability: int | None, name: str, machine: str, gb_s: float) -> None:
    costs = costs_of("GPU", capability, name, machine)
    assert costs.in_bytes_per_s == costs.out_bytes_per_s == gb_s * 1e9


def test_newer_gpus_compute_faster() -> None:
    flops = [costs_of("GPU", major).flops_per_s for major in (7, 8, 9)]
    assert flops == sorted(set(flops))


@pytest.mark.tensorflow
@pytest.mark.parametrize("program", ["v1", "v2", "full"])
def test_a_given_rate_is_taken_and_zero_measures_one(program: str) -> None:
    pytest.importorskip("tensorflow")
    limit = {"TF_CPU_ALLOCATOR_USE_BFC": "true", "TF_CPU_BFC_MEM_LIMIT_IN_MB": "100", "PROGRAM": program}
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3", **limit}
    done = subprocess.run(
        [sys.executable, "-c", CHILD], env=environ, capture_output=True, text=True, timeout=300, check=True
    )
    (known, given, measured), left = json.loads(done.stdout.splitlines()[-1])
    assert (known, given) == (4.0123, 7.5)
    assert 0.1 < measured < 1000, "a copy in memory"
    assert (measured == known) == (program == "full"), "a full device has no room for a probe"
    assert left < 1 << 20, "the probe is gone"


class MirroringLink:
    """Keeps what it has copied, as TensorFlow's eager execution does; tells the time that this takes."""

    def __init__(self, seconds: dict[tuple[str, str], float]) -> None:
        self.seconds = seconds
        self.now = 0.0
        self.mirrors: dict[str, set[str]] = {}

    def make(self, nbytes: int, place: str) -> str:
        self.now += 100.0
        name = f"{place} {len(self.mirrors)} of {nbytes}"
        self.mirrors[name] = set()
        return name

    def copy(self, tensor: str, place: str) -> None:
        source, _ = tensor.split(" ", 1)
        if place not in self.mirrors[tensor]:
            self.now += self.seconds[source, place]
            self.mirrors[tensor].add(place)


@pytest.mark.tensorflow
def test_every_timed_copy_moves_bytes() -> None:
    pytest.importorskip("tensorflow")
    from lms.device.device import Device
    from lms.device.link_speed import PROBE_BYTES, ROUNDS, measured

    gpu, host = "/device:GPU:0", "/device:CPU:0"
    link = MirroringLink({(gpu, host): 4.0, (host, gpu): 2.0})
    rates = measured(Device("GPU:0", 16 << 30), link, lambda: link.now)
    assert rates == (PROBE_BYTES / 4, PROBE_BYTES / 2)
    assert len(link.mirrors) == 2 * ROUNDS, "none is copied twice"
    link = MirroringLink({(host, host): 8.0})
    assert measured(Device("CPU:0", None), link, lambda: link.now) == (PROBE_BYTES / 8,) * 2


def test_a_negative_rate_is_refused() -> None:
    with pytest.raises(ValueError, match="bandwidth_gb_s is -1; needed at least 0"):
        LMSConfig(bandwidth_gb_s=-1)
