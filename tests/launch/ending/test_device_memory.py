"""What the last words of a job say when TensorFlow found no room on the device."""

from collections.abc import Collection

import pytest

from launch.ending.device_memory import explain_lack_of_memory

KERAS = (
    "tensorflow.python.framework.errors_impl.ResourceExhaustedError: Graph execution error:",
    "OOM when allocating tensor with shape[360,8,8,32] and type float",
    "Hint: If you want to see a list of allocated tensors when OOM happens, add report_tensor_allocations",
)
EXPLAINED = (
    "LMS: the step ran out of memory on CPU:0 (limit 40.0 MiB).",
    "Policy 'all' swaps all that it can already: take a smaller batch, or a device with more memory.",
)
REMEDY = (
    "a smaller batch (lmsrun fit forecasts the largest one), or LMS_OPTIMIZER_STATE=host and "
    "LMS_VARIABLES=host, where variables have no room"
)
WITH_LMS = "the device ran out of memory with Large Model Support on"


@pytest.mark.parametrize(
    ("lms", "said"),
    [
        ({"off"}, "the device ran out of memory; Large Model Support is off, try it with --lms"),
        ({"graph", "off"}, "the device ran out of memory; Large Model Support is off, try it with --lms"),
        (
            {"graph"},
            f"{WITH_LMS}; try {REMEDY}",
        ),
        ({"-"}, "the device ran out of memory"),
        ({"not active: an error"}, "the device ran out of memory"),
        ((), "the device ran out of memory"),
    ],
)
def test_the_remedy_goes_by_what_large_model_support_did(lms: Collection[str], said: str) -> None:
    assert explain_lack_of_memory(KERAS, lms) == said


def test_what_large_model_support_says_itself_is_not_said_again() -> None:
    """Its text is long: what TensorFlow wrote above it may be among the last lines no more."""
    said = f"{WITH_LMS}; its last lines say what may help, and lmsrun fit forecasts the largest batch"
    assert explain_lack_of_memory((*KERAS, *EXPLAINED), {"graph"}) == said
    assert explain_lack_of_memory(EXPLAINED, {"graph"}) == said


def test_a_convolution_without_scratch_memory_has_run_out() -> None:
    line = "CUDNN failed to allocate the scratch space for the runner or to find a working no-scratch runner."
    assert explain_lack_of_memory((line,), {"off"}).startswith("the device ran out of memory; Large Model")


@pytest.mark.parametrize(
    "lines",
    [
        (),
        ("ValueError: no data",),
        ("MemoryError",),
        ("ResourceExhaustedError: LMS store: no room for 4 MiB",),
        ("OOM when allocating tensor on host by allocator cuda_host_bfc",),
    ],
)
def test_other_failures_and_memory_of_the_host_are_none_of_it(lines: tuple[str, ...]) -> None:
    assert explain_lack_of_memory(lines, {"off"}) == ""
