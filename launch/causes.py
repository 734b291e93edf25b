"""Why a rank ended: its wait status in words, and who the rank was."""

import os
import signal

from launch.plan import RankPlan


def describe_status(status: int) -> str:
    """A wait status in words: ``exited with code 7``, ``was killed by SIGSEGV (signal 11)``."""
    if not os.WIFSIGNALED(status):
        return f"exited with code {os.waitstatus_to_exitcode(status)}"
    core = ", core dumped" if os.WCOREDUMP(status) else ""
    return f"was killed by {signal_name(os.WTERMSIG(status))} (signal {os.WTERMSIG(status)}){core}"


def exit_code_of(status: int) -> int:
    """A shell's exit code for a wait status: the code itself, or 128 + signal."""
    code = os.waitstatus_to_exitcode(status)
    return 128 - code if code < 0 else code


def describe_rank(plan: RankPlan) -> str:
    """Such as ``rank 1 on localhost (GPU 0004:05:00.0)``."""
    gpu = "no GPU" if plan.gpu is None else f"GPU {plan.gpu.pci_bus_id}"
    return f"rank {plan.rank} on {plan.host} ({gpu})"


def signal_name(number: int) -> str:
    """``SIGINT``, or ``signal 40`` for those without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
