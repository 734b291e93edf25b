"""Convolutions and poolings: oneDNN takes and merges their gradients in the edited graph as in the other.

Without oneDNN other kernels run, which want other things of a plan.
"""

import pytest
from child_job import run_job

pytestmark = pytest.mark.tensorflow


@pytest.mark.parametrize("legacy_keras, onednn", [("0", "1"), ("1", "1"), ("0", "0")])
def test_convolutions_and_poolings_train_to_the_same_bits(legacy_keras: str, onednn: str) -> None:
    pytest.importorskip("tensorflow")
    seen = run_job("conv_bits_job.py", TF_USE_LEGACY_KERAS=legacy_keras, TF_ENABLE_ONEDNN_OPTS=onednn)
    assert len(seen) == 6
    for case, (off, on, tensors) in seen.items():
        assert on == off and tensors >= 5, case
