"""The speed of a device and its link: given, measured, or known of its generation."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import warm_python

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
kept = tf.zeros((24 << 20,)) if os.environ["PROGRAM"] == "full" else None
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
    done = warm_python.run(["-c", CHILD], environ, timeout_s=300)
    assert done.returncode == 0, done.stderr[-3000:]
    (known, given, measured), left = json.loads(done.stdout.splitlines()[-1])
    assert (known, given) == (4.0123, 7.5)
    assert 0.1 < measured < 1000, "a copy in memory"
    assert (measured == known) == (program == "full"), "a full device has no room for a probe"
    assert left < 1 << 20, "the probe is gone"


class SlowToStart:
    """A link whose functions take a while to start, now and then a longer one."""

    def __init__(self, out_bytes_per_s: float, back_bytes_per_s: float) -> None:
        self.rates = out_bytes_per_s, back_bytes_per_s
        self.nbytes = self.runs = 0

    def __call__(self, nbytes: int) -> "SlowToStart":
        self.nbytes = nbytes
        return self

    def seconds(self, outs: int, backs: int) -> float:
        self.runs += 1
        moved = sum(self.nbytes * count / rate for count, rate in zip((outs, backs), self.rates, strict=True))
        return moved + (0.1 if self.runs % 3 else 0.5)


@pytest.mark.tensorflow
def test_a_rate_is_that_of_the_bytes_and_not_of_the_start() -> None:
    pytest.importorskip("tensorflow")
    from lms.device.device import Device
    from lms.device.link_speed import PROBE_BYTES, measured

    link = SlowToStart(40e6, 80e6)
    rates = measured(Device("GPU:0", 16 << 30), lambda nbytes: link(nbytes).seconds)
    assert rates == (pytest.approx(40e6), pytest.approx(80e6)) and link.nbytes == PROBE_BYTES


@pytest.mark.tensorflow
def test_a_small_device_and_a_small_pool_are_left_their_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no time tells more copies from one, all of the time counts."""
    tf = pytest.importorskip("tensorflow")
    from lms.device.device import Device
    from lms.device.link_speed import MOST_REPEATS, REPEATS, SHARE, measured

    sizes: list[int] = []

    def even(nbytes: int) -> Any:
        sizes.append(nbytes)
        return lambda outs, backs: 0.2

    out, _ = measured(Device("GPU:0", 128 << 20), even)
    assert sizes == [(128 << 20) // SHARE] and out == 4 * REPEATS * sizes[0] / 0.2
    monkeypatch.setenv("TF_GPU_HOST_MEM_LIMIT_IN_MB", "32")
    out, _ = measured(Device("GPU:0", 16 << 30), even)
    assert sizes[1:] == [(32 << 20) // SHARE] and out == MOST_REPEATS * sizes[1] / 0.2
    monkeypatch.setenv("TF_GPU_HOST_MEM_LIMIT_IN_MB", "4")
    with pytest.raises(tf.errors.ResourceExhaustedError, match="no room to measure the link"):
        measured(Device("GPU:0", 16 << 30), even)


def test_a_negative_rate_is_refused() -> None:
    with pytest.raises(ValueError, match="bandwidth_gb_s is -1; needed at least 0"):
        LMSConfig(bandwidth_gb_s=-1)
