"""The device whose memory is planned."""

from types import SimpleNamespace
from typing import Any

import pytest
from child_job import run_job

pytestmark = pytest.mark.tensorflow


def test_the_limit_of_a_gpu_is_asked_with_this_process_own_configuration() -> None:
    """Another one would start every GPU of the machine."""
    tf = pytest.importorskip("tensorflow")
    from tensorflow.python.eager import context

    from lms.device.device import gpu_limits

    asked: list[Any] = []

    def list_devices(config: Any) -> list[Any]:
        asked.append(config)
        kinds = (("CPU", 1), ("GPU", 20), ("GPU", 30))
        return [SimpleNamespace(device_type=kind, memory_limit=limit) for kind, limit in kinds]

    assert gpu_limits(list_devices) == {0: 20, 1: 30}
    assert asked == [context.context().config]
    assert list(gpu_limits()) == list(range(len(tf.config.list_logical_devices("GPU")))), (
        "of each that is here"
    )


def test_the_driver_s_pool_of_a_gpu_maps_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    tf = pytest.importorskip("tensorflow")
    from lms.device import device
    from lms.device.link_speed import costs_of_device

    known = iter([(9, 0), None, (9, 0)])
    with monkeypatch.context() as patched:
        patched.setattr(tf.config, "list_logical_devices", lambda _kind: ["one", "other"])
        patched.setattr(tf.config, "get_visible_devices", lambda _kind: ["one", "other"])
        patched.setattr(device, "gpu_limits", lambda: {0: 1 << 34, 1: 1 << 34})
        patched.setattr(device, "_capability", lambda _gpu: next(known, None))
        gpu, other = device.read_devices({"TF_GPU_ALLOCATOR": "cuda_malloc_async"})
        plain, _ = device.read_devices({})
    assert gpu.maps_pages and not other.maps_pages, "only NVIDIA's driver does"
    assert plain.capability == (9, 0) and not plain.maps_pages
    assert costs_of_device(gpu, 12.0).maps_pages and not costs_of_device(plain, 12.0).maps_pages


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
        (
            "ResourceExhaustedError",
            "OOM when allocating tensor by allocator pluggable_device_host_bfc",
            False,
        ),
        ("InvalidArgumentError", "RESOURCE_EXHAUSTED", False),
        ("UnknownError", "CUDNN failed to allocate the scratch space for the runner or to find a", True),
        ("InternalError", "No-scratch fallback runner requires nonzero scratch space", True),
        ("UnknownError", "CUDNN_STATUS_EXECUTION_FAILED", False),
        ("UnknownError", "tensorflow.python.framework.errors_impl.ResourceExhaustedError: {{x}} OOM", True),
        ("UnknownError", "errors_impl.ResourceExhaustedError: OOM by allocator gpu_host_bfc", False),
        ("UnknownError", "ValueError: no room", False),
        ("ResourceExhaustedError", "{{node PyFunc}} MemoryError: replay buffer is full", False),
    ],
)
def test_what_is_out_of_memory(kind: str, text: str, memory: bool) -> None:
    tf = pytest.importorskip("tensorflow")
    from lms.device.device import is_out_of_memory

    assert is_out_of_memory(getattr(tf.errors, kind)(None, None, text)) == memory


@pytest.mark.parametrize(
    ("kind", "text", "peaks", "full"),
    [
        ("ResourceExhaustedError", "OOM when allocating tensor by allocator gpu_host_bfc", (100, 100), True),
        ("ResourceExhaustedError", "OOM when allocating tensor by allocator GPU_0_bfc", (10, 10), False),
        ("ResourceExhaustedError", "SameWorkerRecvDone unable to allocate output tensor", (10, 50), True),
        ("ResourceExhaustedError", "SameWorkerRecvDone unable to allocate output tensor", (10, 51), False),
        ("ResourceExhaustedError", "SameWorkerRecvDone unable to allocate output tensor", (10, None), False),
        ("InternalError", "SameWorkerRecvDone unable to allocate output tensor", (10, 10), False),
    ],
)
def test_what_is_out_of_pinned_memory(
    kind: str, text: str, peaks: tuple[int | None, ...], full: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy does not say which side has no room: two GPUs of 100 bytes tell it by their peaks."""
    tf = pytest.importorskip("tensorflow")
    from lms.device.device import Device, is_out_of_pinned_memory

    def memory(device: Device) -> tuple[int, int] | None:
        peak = peaks[device.number]
        return None if peak is None else (0, peak)

    monkeypatch.setattr(Device, "memory", memory)
    error, gpus = getattr(tf.errors, kind)(None, None, text), [Device("GPU:0", 100), Device("GPU:1", 100)]
    assert is_out_of_pinned_memory(error, gpus) == full
    assert not is_out_of_pinned_memory(error, [Device("CPU:0", 100)]) or "host_bfc" in text


def test_options_that_work_against_a_plan_are_told() -> None:
    tf = pytest.importorskip("tensorflow")
    from lms.intercept.optimizer_options import doubtful_options

    assert not list(doubtful_options({"TF_XLA_FLAGS": "--tf_xla_cpu_global_jit --tf_xla_auto_jit=-1"}))
    tf.config.optimizer.set_jit(True)
    doubtful = {"auto_mixed_precision": True, "disable_meta_optimizer": True}
    tf.config.optimizer.set_experimental_options(doubtful)
    try:
        clustering, flag, precision, idle = doubtful_options(
            {"TF_XLA_FLAGS": "--x=1 --tf_xla_auto_jit=2 --y=1"}
        )
    finally:
        tf.config.optimizer.set_jit(False)
        tf.config.optimizer.set_experimental_options(dict.fromkeys(doubtful, False))
    assert "set_jit(False)" in clustering and "take --tf_xla_auto_jit=2 out" in flag
    assert "tf.keras.mixed_precision" in precision and "LMS plans none" in idle


@pytest.mark.parametrize(
    ("listed", "chosen"),
    [("2", ["GPU:2"]), ("1,0", ["GPU:1", "GPU:0"]), ("", None), ("3", None), ("all", None)],
)
def test_a_sessions_choice_of_gpus_holds_for_the_process(listed: str, chosen: list[str] | None) -> None:
    tf = pytest.importorskip("tensorflow")
    from lms.device.device import adopt_gpus

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


def test_each_of_several_gpus_is_planned_by_itself() -> None:
    pytest.importorskip("tensorflow")
    from lms.device.device import Device

    first, tenth, cpu = Device("GPU:1", 1 << 30), Device("GPU:10", 2 << 30), Device("CPU:0", None)
    job = "/job:localhost/replica:0/task:0/device:"
    assert [one.holds(f"{job}GPU:1") for one in (first, tenth, cpu)] == [True, False, False]
    assert [one.holds(f"{job}GPU:10") for one in (first, tenth, cpu)] == [False, True, False]
    assert [one.holds(f"{job}CPU:1") for one in (first, tenth, cpu)] == [False, False, True]


def test_a_step_on_two_devices_is_planned_for_each_and_trains_to_the_same_bits() -> None:
    pytest.importorskip("tensorflow")
    seen = run_job("two_devices_job.py")
    assert seen["same"] and seen["warnings"] == []
    assert len(seen["tensors"]) == 2 and min(seen["tensors"]) > 0
    assert seen["swapped"] == 3 * sum(seen["tensors"]), "in each of three steps"
    first, second = seen["budgets"]
    assert first == pytest.approx(2 * second, rel=0.1), "of 64 MiB and of 32"
