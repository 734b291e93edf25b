"""Steps for which TensorFlow would add in the order in which terms arrive."""

import pytest
from child_job import run_job

pytestmark = pytest.mark.tensorflow


def test_a_large_step_trains_to_the_same_bits_whether_it_is_edited_or_not() -> None:
    """The memory optimizer would make another sum of the step that no plan changes."""
    pytest.importorskip("tensorflow")
    seen = run_job("large_sums_job.py")
    chains = {policy: count for policy, (count, _, _) in seen.items()}
    assert chains.pop("without") > 0, "TensorFlow leaves the sums of this step as they are"
    assert chains == {"auto": 0, "all": 0}
    (_, fits, nothing), (_, trained, tensors) = seen["auto"], seen["all"]
    assert trained == fits and nothing == 0 < tensors
