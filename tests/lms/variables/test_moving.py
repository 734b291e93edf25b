"""An optimizer's state that moves to the host by itself."""

import pytest
from child_job import run_job

pytestmark = pytest.mark.tensorflow
LIMIT_MB = 25
"""Of 24 MiB of variables two thirds are the optimizer's state."""


def test_the_other_trace_of_a_step_leaves_on_the_host_what_was_moved_for_one() -> None:
    """It brought the state back when it ran next, and the step after that ran out of memory."""
    pytest.importorskip("tensorflow")
    plain = run_job("variables/moving_job.py", "off")
    seen = run_job("variables/moving_job.py", "auto", TF_CPU_BFC_MEM_LIMIT_IN_MB=str(LIMIT_MB))
    assert seen["bits"] == plain["bits"]
    assert seen["state"] > 0 and seen["retries"] == 0
