"""Steps with branches, loops and ops that block train as without Large Model Support."""

import pytest
from child_job import run_job

pytestmark = pytest.mark.tensorflow


@pytest.mark.parametrize("kind", ["branches", "updates", "loop", "staging"])
def test_control_flow_keeps_the_bits(kind: str) -> None:
    plain, found = run_job("rewriter/flow_job.py", "off", kind), run_job("rewriter/flow_job.py", "all", kind)
    assert len(set(plain["losses"])) > 3, "it trains"
    assert (found["losses"], found["bits"]) == (plain["losses"], plain["bits"])
    assert found["swapped"] > 0 and found["warnings"] == []
