"""Steps for a GPU, optimized by TensorFlow beside a virtual one and planned behind that."""

from typing import Any

import pytest
from child_job import run_job

pytestmark = pytest.mark.tensorflow

MACHINE = "/job:localhost/replica:0/task:0/device:"


@pytest.mark.parametrize(
    ("case", "transport", "device"), [("device", "device", "GPU:0"), ("stored", "file", "CPU:0")]
)
def test_swaps_are_planned_for_the_gpu_and_nothing_else_changes(
    case: str, transport: str, device: str
) -> None:
    """With a folder to store in it swaps through the host."""
    pytest.importorskip("tensorflow")
    seen: dict[str, Any] = run_job("gpu_job.py", case)
    assert seen["transport"] == transport
    assert seen["outs"] == seen["tensors"] > 0 and seen["ins"] == seen["swap_ins"]
    assert seen["devices"] == [MACHINE + device]
    assert seen["others"], "an op came or went beside the swaps"


def test_what_a_kernel_of_a_gpu_leaves_on_the_host_is_known() -> None:
    tf = pytest.importorskip("tensorflow")
    from tensorflow.core.framework import node_def_pb2

    from lms.device.device import Device

    def stays(op_type: str, dtype: Any, device: str = "GPU:0") -> bool:
        node = node_def_pb2.NodeDef(op=op_type)
        for name in ("T", "out_type"):
            node.attr[name].type = dtype.as_datatype_enum
        return Device(device, None).keeps_on_host(node, 0)

    assert stays("Shape", tf.int32) and stays("AddV2", tf.int32)
    assert not stays("AddV2", tf.float32) and not stays("Shape", tf.int32, "CPU:0")
