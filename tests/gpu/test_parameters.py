"""Variables of a GPU that lie in pinned host memory between steps: the same bits, in less device memory."""

import os
from pathlib import Path
from typing import Any

import pytest
import stand_in

pytestmark = pytest.mark.tensorflow

ROOT = Path(__file__).resolve().parents[2]
JOB = str(ROOT / "tests/lms/bits/host_state_job.py")
PARAMETERS = str(Path(__file__).with_name("parameters_job.py"))
LIMIT_MB = 21
MIB = 1 << 20


def train(keras: str, *asked: str, **environ: str) -> Any:
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests/lms")])
    return stand_in.run([JOB, keras, *asked], {"PYTHONPATH": path, **environ}).found


@pytest.mark.parametrize(("keras", "names"), [("3", ("adamw", "clipped")), ("2", ("momentum", "v1_adam"))])
def test_every_optimizer_ends_in_the_same_bits(keras: str, names: tuple[str, ...]) -> None:
    for name, seen in train(keras, *names).items():
        assert len({one["digest"] for one in seen.values()}) == 1, name
        for mode in ("state", "host"):
            assert seen[mode]["state"] and bool(seen[mode]["weights"]) == (mode == "host"), (name, mode)
            assert seen[mode]["saved"] and seen[mode]["warnings"] == [], (name, mode)


@pytest.mark.parametrize("mode", ["host", "auto"])
def test_a_transformer_trains_whose_variables_are_two_and_a_half_times_the_limit(mode: str) -> None:
    plain = train("3", "transformer", "plain", SIMGPU_MEMORY_MB="200")["transformer"]["plain"]
    seen = train("3", "transformer", mode, SIMGPU_MEMORY_MB=str(LIMIT_MB))["transformer"][mode]
    assert seen["digest"] == plain["digest"]
    assert seen["bytes"] == plain["bytes"] >= 2.5 * (LIMIT_MB << 20)
    assert seen["saved"] and seen["state"]
    if mode == "host":
        assert seen["warnings"] == [] and seen["left_bytes"] < seen["bytes"] / 20
    assert seen["peak_bytes"] <= LIMIT_MB << 20


@pytest.mark.parametrize("way", ["mirrored", "second", "mixed", "several"])
def test_the_bits_are_the_same_on_two_devices_under_a_condition_and_in_a_loop(way: str) -> None:
    plain, state, host = (
        stand_in.run([PARAMETERS, mode, way], {"SIMGPU_DEVICES": "2"}).found
        for mode in ("plain", "state", "host")
    )
    assert plain["bits"] == state["bits"] == host["bits"]
    if way == "second":
        assert host["device"] == "GPU:1" and host["peak"] > MIB
    if way != "several":
        assert state["warnings"] == host["warnings"] == []
        # A weight has 1 MiB; what keeps the room for small buffers apart stays on each device, too.
        assert host["left"] < 2 * MIB < state["left"] < 0.7 * plain["left"]
    else:
        (said,) = host["warnings"]
        assert "cannot lie on the host: used in a loop or by a function that is called" in said


def test_what_another_device_reads_comes_back_to_its_own() -> None:
    """The CPU adds up the gradients of both devices, which swap them."""
    plain, made = (
        stand_in.run([PARAMETERS, mode, "mirrored", "all", "off"], {"SIMGPU_DEVICES": "2"}).found
        for mode in ("plain", "state")
    )
    assert plain["bits"] == made["bits"] and made["warnings"] == []


def test_a_value_of_another_type_is_refused() -> None:
    script = (
        "import json, os, numpy, lms, tensorflow as tf\n"
        "from lms.native.build import HOST_VALUES\n"
        "from lms.native.library import load_library\n"
        "lms.enable(optimizer_state='host', min_tensor_bytes=4096)\n"
        "variable = tf.Variable(tf.ones((64, 64)), trainable=False)\n"
        "give = load_library(HOST_VALUES, os.environ).ops.lms_set_host_value\n"
        "said = ''\n"
        "try: give(resource=variable.handle, value=numpy.zeros((64, 64)))\n"
        "except tf.errors.InvalidArgumentError as error: said = str(error)\n"
        "tf.test.experimental.sync_devices()  # the copy of the value holds its memory until it is done\n"
        "device = tf.config.experimental.get_memory_info('GPU:0')['current']\n"
        "print(json.dumps([said, float(variable.numpy().sum()), device]))"
    )
    said, total, device = stand_in.run(["-c", script], {}).found
    assert "is of another type" in said
    assert total == 64 * 64 and device < 64 * 64 * 4


def test_a_variable_of_the_device_gets_no_value_in_pinned_memory() -> None:
    script = (
        "import json, lms, tensorflow as tf\n"
        "lms.enable(optimizer_state='host', min_tensor_bytes=4096)\n"
        "in_use = lambda: tf.config.experimental.get_memory_info('GPU:0')['current']\n"
        "with tf.device('GPU:0'):\n"
        "    held = tf.Variable(tf.ones((1 << 18,)), trainable=False)\n"
        "    target = tf.Variable(tf.zeros((1 << 18,)))\n"
        "before = in_use()\n"
        "target.assign(held)\n"
        "held.assign(tf.zeros((1 << 18,)))\n"
        "print(json.dumps([before - in_use(), float(target.numpy().sum())]))"
    )
    shared, total = stand_in.run(["-c", script], {}).found
    assert shared < 4096 and total == 1 << 18


def test_a_value_leaves_a_device_that_has_no_room_for_a_copy_of_it() -> None:
    script = (
        "import json, os, tensorflow as tf\n"
        "from lms.variables.host_values import PinnedValues\n"
        "(gpu,) = tf.config.list_physical_devices('GPU')\n"
        "tf.config.set_logical_device_configuration(gpu, [tf.config.LogicalDeviceConfiguration(12)])\n"
        "with tf.device('GPU:0'): variable = tf.Variable(tf.fill((2 << 20,), 3.0))\n"
        "PinnedValues(os.environ).send(variable.handle)\n"
        "device = tf.config.experimental.get_memory_info('GPU:0')['current']\n"
        "print(json.dumps([device, variable.numpy()[:4].tolist()]))"
    )
    device, first = stand_in.run(["-c", script], {"SIMGPU_DEVICES": "1"}).found
    assert device < 1 << 20 and first == [3.0] * 4


def test_other_transports_are_refused_in_one_line() -> None:
    script = (
        "import json, lms\n"
        "try: lms.enable(optimizer_state='host', transport='host')\n"
        "except Exception as error: print(json.dumps([type(error).__name__, str(error)]))"
    )
    name, text = stand_in.run(["-c", script], {}).found
    assert name == "PlaceError" and "\n" not in text
    assert text.startswith("optimizer_state is 'host' and transport is 'host'; needed transport 'device'")
