"""Trains a step whose halves are on two devices, each with a limit of its own; prints its plans as JSON.

Two logical CPU devices have the place of two GPUs.
"""

import json
import os
import warnings
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import tensorflow as tf  # noqa: E402

import lms  # noqa: E402
from lms.device.device import Device  # noqa: E402
from lms.engine.installation import engine  # noqa: E402

MIB = 1 << 20
LAYERS = 12
tf.config.set_visible_devices([], "GPU")


class Half(Device):
    """One logical device, apart from the others of the process."""

    def holds(self, name: str) -> bool:
        """See the base class."""
        return name.endswith(self.name)


def train() -> list[bytes]:
    """Three steps from the same start."""
    weights = [tf.Variable(tf.random.stateless_normal((128, 128), (seed, 1)) * 0.1) for seed in range(LAYERS)]

    @tf.function
    def step(x: Any) -> None:
        with tf.GradientTape() as tape:
            for number, weight in enumerate(weights):
                with tf.device(f"/device:CPU:{2 * number // LAYERS}"):
                    x = tf.tanh(x @ weight)
            loss = tf.reduce_sum(x * x)
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(1e-5 * gradient)

    for _ in range(3):
        step(tf.random.stateless_uniform((1024, 128), (1, 2)))
    return [weight.numpy().tobytes() for weight in weights]


def main() -> dict[str, Any]:
    """Train without LMS and with it."""
    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    off = train()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lms.enable(policy="all")
        engine().resources._devices = (Half("CPU:0", 64 * MIB), Half("CPU:1", 32 * MIB))
        same = train() == off
    report = lms.report()
    return {
        "same": same,
        "tensors": [graph.tensors for graph in report.edited],
        "swapped": report.store.swap_outs,
        "budgets": [graph.budget_bytes for graph in report.edited],
        "warnings": report.warnings,
    }


print(json.dumps(main()))
