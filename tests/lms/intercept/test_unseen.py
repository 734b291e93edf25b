"""What LMS cannot help is told once with the remedy, and what it can help is not."""

from typing import Any

import pytest
from child_job import run_job

pytestmark = pytest.mark.tensorflow

EAGER = "a training step runs in eager execution"
AROUND = "is called under a gradient tape outside of any tf.function"
CLUSTERS = "XLA auto-clustering is on (set_jit)"
KNOWN = (EAGER, AROUND, CLUSTERS)

CASES: dict[str, tuple[list[str], bool]] = {
    "fit traced before": ([], True),
    "fit": ([], True),
    "fit run eagerly": ([EAGER], False),
    "eager loop": ([EAGER], False),
    "eager fit of a scale": ([], False),
    "tape around a function": ([AROUND], False),
    "saliency and evaluation": ([], False),
    "jit after enable": ([CLUSTERS], True),
    "finalized session": ([], True),
}
"""What is told, and whether a step is edited."""


@pytest.fixture(scope="module", params=["keras3", "tf_keras"])
def seen(request: pytest.FixtureRequest) -> dict[str, Any]:
    pytest.importorskip("tensorflow")
    if request.param == "tf_keras":
        pytest.importorskip("tf_keras")
    return run_job("unseen_job.py", request.param)


@pytest.mark.parametrize("case", CASES)
def test_told_once_and_only_there(case: str, seen: dict[str, Any]) -> None:
    texts, edited = seen[case]
    assert ([mark for text in texts for mark in KNOWN if mark in text], edited) == CASES[case], texts
