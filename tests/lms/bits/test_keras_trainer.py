"""Keras's own tests of its trainer pass with every tensor a candidate, as they do without LMS."""

import pytest
from bits_runs import ALL, keras_environ, skip_without
from child_job import run_job

pytestmark = pytest.mark.tensorflow

QUICK = "test_fit_flow"


def test_keras_trains_as_its_tests_say() -> None:
    skip_without("3")
    chosen = [] if ALL else ["-k", QUICK]
    found = run_job("bits/keras_trainer_job.py", *chosen, **keras_environ("3"))
    if "skipped" in found:
        pytest.skip(found["skipped"])
    assert found["broken"] == {}
    assert found["passed"] > 4
    assert found["tensors"] > 0
