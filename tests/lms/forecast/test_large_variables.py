"""A step whose variables are too large for the device is forecast as it trains."""

import pytest
from child_job import run_job

pytestmark = pytest.mark.tensorflow
LIMIT_MB = 30
"""Two layers of 4 MiB, as much for each of Adam's two slots and for the gradients, are 32 MiB."""


def test_few_large_variables_are_forecast_to_train_where_they_do() -> None:
    """Worked out from totals, two groups of a weight and its state alone took more than the device has."""
    pytest.importorskip("tensorflow")
    limit = {"TF_CPU_BFC_MEM_LIMIT_IN_MB": str(LIMIT_MB)}
    told = run_job("forecast/large_variables_job.py", "fit", **limit)
    ran = run_job("forecast/large_variables_job.py", "run", **limit)
    auto, hybrid = told["auto"], told["hybrid"]
    assert not hybrid["fits"] and auto["fits"]
    assert ran["moved"] > 0
    assert max(auto["peak_bytes"], ran["planned"], ran["measured"]) <= LIMIT_MB << 20
