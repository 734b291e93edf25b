"""What TensorFlow keeps for plans that run no more takes no memory."""

import pytest
from child_job import run_job

pytestmark = pytest.mark.tensorflow
TABLE_MIB = 4


@pytest.mark.parametrize("way", ["grow", "toggle"])
def test_constants_of_old_plans_are_freed(way: str) -> None:
    """The batches grow four times, or LMS is switched off and on."""
    pytest.importorskip("tensorflow")
    found = run_job("old_kernels_job.py", way)
    assert found["plans"] == 4
    first, *later = found["in use"]
    assert first >= TABLE_MIB and max(later) <= first + 1
    assert found["losses"] == sorted(found["losses"], reverse=True), "it trains on"


def test_kernels_that_draw_are_kept() -> None:
    """The step keeps its plan, for another would draw from the beginning again."""
    pytest.importorskip("tensorflow")
    assert run_job("old_kernels_job.py", "drawing")["plans"] == 1


def test_small_constants_are_left_where_they_are() -> None:
    """A function that is put back no longer knows which line of the program made an op."""
    pytest.importorskip("tensorflow")
    found = run_job("old_kernels_job.py", "small")
    assert found["plans"] == 4 and found["in use"][-1] > found["in use"][0]
