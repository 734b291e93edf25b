"""A step whose plan has fillers trains to the same bits, in memory of the planned size."""

import pytest
from child_job import run_job

pytestmark = pytest.mark.tensorflow

POOL = {
    "TF_CPU_ALLOCATOR_USE_BFC": "true",
    "TF_CPU_BFC_MEM_LIMIT_IN_MB": "200",
    "CUDA_VISIBLE_DEVICES": "",
}


def test_a_plan_with_fillers_trains_to_the_same_bits() -> None:
    pytest.importorskip("tensorflow")
    plain = run_job("filled_job.py", "0", **POOL)
    filled = run_job("filled_job.py", "9", **POOL)
    assert filled["fillers"] > 0 < filled["swaps"]
    assert filled["digest"] == plain["digest"]
    assert not filled["warnings"]
    (note, *_) = filled["notes"]
    told = "1 filler keeps" if filled["fillers"] == 1 else f"{filled['fillers']} fillers keep"
    assert note.startswith(f"{told} buffers from")


def test_without_a_compiler_plans_have_no_fillers() -> None:
    """The plan had some, and the step is planned again."""
    pytest.importorskip("tensorflow")
    found = run_job("filled_job.py", "9", "without", **POOL)
    assert found["fillers"] == 0 < found["swaps"]


def test_a_plan_that_does_not_fit_in_pieces_is_warned_of() -> None:
    """It is tried all the same: the simulation may be wrong by a few percent."""
    pytest.importorskip("tensorflow")
    found = run_job("filled_job.py", "9", "nothing fits", **POOL)
    assert found["swaps"] > 0
    (told,) = found["warnings"]
    assert "may run out of memory: free memory lies in pieces" in told


def test_a_plan_that_may_fail_by_chance_is_warned_of() -> None:
    pytest.importorskip("tensorflow")
    found = run_job("filled_job.py", "9", "doubtful", **POOL)
    assert found["swaps"] > 0
    (told,) = found["warnings"]
    assert "may run out of memory: its buffers fit in the" in told
    assert "but not beside all batches that the input pipeline may make ready; a smaller batch" in told
