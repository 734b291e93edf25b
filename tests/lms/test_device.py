"""The device whose memory is planned."""

from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.tensorflow


def test_the_limit_of_a_gpu_is_asked_with_this_process_own_configuration() -> None:
    """Another one would start every GPU of the machine."""
    pytest.importorskip("tensorflow")
    from tensorflow.python.eager import context

    from lms.device import gpu_limit

    asked: list[Any] = []

    def list_devices(config: Any) -> list[Any]:
        asked.append(config)
        kinds = (("CPU", 1), ("GPU", 20), ("GPU", 30))
        return [SimpleNamespace(device_type=kind, memory_limit=limit) for kind, limit in kinds]

    assert gpu_limit(list_devices) == 20
    assert asked == [context.context().config]
    assert gpu_limit() is None, "there is none here"


@pytest.mark.parametrize(
    ("kind", "text", "memory"),
    [
        ("ResourceExhaustedError", "OOM when allocating tensor", True),
        (
            "NotFoundError",
            "No algorithm worked!  Error messages:\n  engine 1: RESOURCE_EXHAUSTED",
            True,
        ),
        ("NotFoundError", "No algorithm worked!  Error messages:\n  CUDNN_STATUS_NOT_SUPPORTED", False),
        ("NotFoundError", "Resource does not exist", False),
        ("ResourceExhaustedError", "OOM when allocating tensor on GPU:0 by allocator gpu_host_bfc", False),
        ("InvalidArgumentError", "RESOURCE_EXHAUSTED", False),
    ],
)
def test_what_is_out_of_memory(kind: str, text: str, memory: bool) -> None:
    tf = pytest.importorskip("tensorflow")
    from lms.device import is_out_of_memory

    assert is_out_of_memory(getattr(tf.errors, kind)(None, None, text)) == memory


def test_options_that_work_against_a_plan_are_told() -> None:
    tf = pytest.importorskip("tensorflow")
    from lms.grappler import doubtful_options

    assert not list(doubtful_options({"TF_XLA_FLAGS": "--tf_xla_cpu_global_jit --tf_xla_auto_jit=-1"}))
    tf.config.optimizer.set_jit(True)
    tf.config.optimizer.set_experimental_options({"auto_mixed_precision": True})
    try:
        clustering, flag, precision = doubtful_options({"TF_XLA_FLAGS": "--x=1 --tf_xla_auto_jit=2 --y=1"})
    finally:
        tf.config.optimizer.set_jit(False)
        tf.config.optimizer.set_experimental_options({"auto_mixed_precision": False})
    assert "set_jit(False)" in clustering and "take --tf_xla_auto_jit=2 out" in flag
    assert "tf.keras.mixed_precision" in precision


@pytest.mark.parametrize(
    ("listed", "chosen"),
    [("2", ["GPU:2"]), ("1,0", ["GPU:1", "GPU:0"]), ("", None), ("3", None), ("all", None)],
)
def test_a_sessions_choice_of_gpus_holds_for_the_process(listed: str, chosen: list[str] | None) -> None:
    tf = pytest.importorskip("tensorflow")
    from lms.device import adopt_gpus

    class Options:
        visible: list[str] | None = None

        def list_physical_devices(self, kind: str) -> list[str]:
            return [f"{kind}:{number}" for number in range(3)]

        def set_visible_devices(self, devices: list[str], kind: str) -> None:
            self.visible = devices

    options = Options()
    config = tf.compat.v1.ConfigProto(gpu_options=tf.compat.v1.GPUOptions(visible_device_list=listed))
    adopt_gpus(config, options)
    assert options.visible == chosen
    adopt_gpus(None, options)
    assert options.visible == chosen


def test_more_than_the_pool_of_pinned_memory_holds_is_refused_before_training() -> None:
    pytest.importorskip("tensorflow")
    from lms.errors import StoreError
    from lms.transports.device import DeviceTransport

    transport = DeviceTransport({"TF_GPU_HOST_MEM_LIMIT_IN_MB": "100"})
    transport.require_room(100 << 20)
    with pytest.raises(StoreError, match="swaps 101 MiB .* holds 100; raise TF_GPU_HOST_MEM_LIMIT_IN_MB"):
        transport.require_room(101 << 20)
    DeviceTransport({}).require_room(128 << 30)


def test_of_several_gpus_the_first_is_planned_and_that_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorflow")
    from lms import engine as engine_module
    from lms.config import LMSConfig
    from lms.device import Device
    from lms.enable import LMSWarning

    monkeypatch.setattr(engine_module, "read_device", lambda _: Device("GPU:0", 1 << 30, others=1))
    engine = engine_module.Engine(LMSConfig(), {})
    with pytest.warns(LMSWarning, match="several GPUs are visible .* start one process a GPU"):
        assert engine.device.others == 1
