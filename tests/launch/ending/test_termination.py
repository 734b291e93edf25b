"""The signals that end a job, each at its time."""

import signal

from launch.ending.termination import plan_signals


def test_a_job_is_killed_within_the_grace_period() -> None:
    assert plan_signals(signal.SIGTERM, 10) == [(0, signal.SIGTERM), (10, signal.SIGKILL)]
    assert plan_signals(signal.SIGINT, 10) == [(0, signal.SIGINT), (5, signal.SIGTERM), (10, signal.SIGKILL)]
