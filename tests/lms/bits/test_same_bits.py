"""With LMS a script trains to the bits that it trains to without, at TensorFlow's own settings."""

import pytest
from child_job import run_job

pytestmark = pytest.mark.tensorflow


@pytest.mark.parametrize("legacy_keras", ["0", "1"])
def test_models_train_to_the_same_bits_as_without_lms(legacy_keras: str) -> None:
    pytest.importorskip("tensorflow")
    seen = run_job("same_bits_job.py", TF_USE_LEGACY_KERAS=legacy_keras)
    assert [name for name, (off, on, _) in seen.items() if on != off] == []
    assert all(tensors > 2 for _, _, tensors in seen.values()), seen
