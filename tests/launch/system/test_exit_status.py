"""Why a rank ended, as far as wait statuses and the kernel's counters tell."""

import signal

import pytest

from launch.model.plan import RankPlan
from launch.model.topology import Gpu
from launch.system.exit_status import describe_rank, describe_status, exit_code_of, explain_crash

RANK = RankPlan(
    1, 1, "node7", Gpu(1, "0004:05:00.0"), 8, frozenset({0}), "none", frozenset(), None, {}, ("true",)
)
BOUND = RankPlan(1, 1, "node7", None, 8, frozenset({0}), "bind", frozenset({8}), None, {}, ("true",))


@pytest.mark.parametrize(
    ("status", "text", "code"),
    [
        (7 << 8, "exited with code 7", 7),
        (255 << 8, "exited with code 255", 255),
        (signal.SIGKILL, "was killed by SIGKILL (signal 9)", 137),
        (signal.SIGSEGV | 0x80, "was killed by SIGSEGV (signal 11), core dumped", 139),
        (40, "was killed by signal 40 (signal 40)", 168),
    ],
)
def test_statuses(status: int, text: str, code: int) -> None:
    assert describe_status(status) == text
    assert exit_code_of(status) == code


LIMITED = {"TF_CPU_ALLOCATOR_USE_BFC": "true", "TF_CPU_BFC_MEM_LIMIT_IN_MB": "300"}
ACTIVE = {"lms": {"active": True}}


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT])
def test_a_crash_at_the_limit_of_the_cpu_device_may_be_for_want_of_memory(number: int) -> None:
    why = explain_crash(number, LIMITED, ACTIVE)
    assert why.startswith("; at the limit of the CPU device (TF_CPU_BFC_MEM_LIMIT_IN_MB=300) oneDNN may end")
    assert "try LMS_MARGIN=0.2, LMS_POLICY=all or" in why
    assert "try LMS_MARGIN=0.2 or" in explain_crash(number, {**LIMITED, "LMS_POLICY": "all"}, ACTIVE)


@pytest.mark.parametrize(
    ("status", "environ", "framework"),
    [
        (signal.SIGTERM, LIMITED, ACTIVE),
        (1 << 8, LIMITED, ACTIVE),
        (signal.SIGSEGV, {}, ACTIVE),
        (signal.SIGSEGV, {"TF_CPU_BFC_MEM_LIMIT_IN_MB": "300"}, ACTIVE),
        (signal.SIGSEGV, LIMITED, {"lms": {"active": False}}),
        (signal.SIGSEGV, LIMITED, {}),
    ],
)
def test_other_ends_get_no_such_advice(
    status: int, environ: dict[str, str], framework: dict[str, object]
) -> None:
    assert explain_crash(status, environ, framework) == ""


def test_ranks_are_named_with_host_and_gpu() -> None:
    assert describe_rank(RANK) == "rank 1 on node7 (GPU 0004:05:00.0)"
    assert describe_rank(BOUND) == "rank 1 on node7 (no GPU)"
