"""Why a rank ended: its wait status in words, and who the rank was."""

import os
import signal
from collections.abc import Mapping
from typing import Any

from launch.model.plan import RankPlan

_LIMITED = ("TF_CPU_ALLOCATOR_USE_BFC", "TF_CPU_BFC_MEM_LIMIT_IN_MB")
"""With both the CPU device has a hard limit."""


def describe_status(status: int) -> str:
    """Describe a wait status: ``exited with code 7``, ``was killed by SIGSEGV (signal 11)``."""
    if not os.WIFSIGNALED(status):
        return f"exited with code {os.waitstatus_to_exitcode(status)}"
    core = ", core dumped" if os.WCOREDUMP(status) else ""
    return f"was killed by {signal_name(os.WTERMSIG(status))} (signal {os.WTERMSIG(status)}){core}"


def explain_crash(status: int, environ: Mapping[str, str], framework: Mapping[str, Any]) -> str:
    """Explain what may have made a rank crash under Large Model Support, as the end of a sentence, or empty.

    Some of oneDNN's kernels do not look whether they got the memory that they asked for, and end the process
    where TensorFlow would raise an error.

    Args:
        status: The rank's wait status.
        environ: Its variables.
        framework: Its receipt of that name.
    """
    crashed = os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGABRT, signal.SIGSEGV)
    lms = framework.get("lms")
    if (
        not crashed
        or not (isinstance(lms, dict) and lms.get("active"))
        or not all(map(environ.get, _LIMITED))
    ):
        return ""
    policy = "" if environ.get("LMS_POLICY") == "all" else ", LMS_POLICY=all"
    return (
        f"; at the limit of the CPU device ({_LIMITED[1]}={environ[_LIMITED[1]]}) oneDNN may end a process "
        f"so when memory runs out: try LMS_MARGIN=0.2{policy} or a smaller batch; with "
        "TF_ENABLE_ONEDNN_OPTS=0 TensorFlow says what had no room"
    )


def exit_code_of(status: int) -> int:
    """Convert a wait status to a shell's exit code: the code itself, or 128 + signal."""
    code = os.waitstatus_to_exitcode(status)
    return 128 - code if code < 0 else code


def describe_rank(plan: RankPlan) -> str:
    """Such as ``rank 1 on localhost (GPU 0004:05:00.0)``."""
    gpu = "no GPU" if plan.gpu is None else f"GPU {plan.gpu.address}"
    return f"rank {plan.rank} on {plan.host} ({gpu})"


def signal_name(number: int) -> str:
    """``SIGINT``, or ``signal 40`` for those without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
