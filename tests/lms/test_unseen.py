"""What LMS cannot help is told once with the remedy, and what it can help is not."""

from typing import Any

import pytest
from child_job import run_job

pytestmark = pytest.mark.tensorflow

BEFORE = "was traced before lms.enable() and stays as it is"
EAGER = "a training step runs in eager execution"
AROUND = "is called under a gradient tape outside of any tf.function"
CLUSTERS = "XLA auto-clustering is on (set_jit)"
FINALIZED = "the graph is finalized, so LMS cannot edit it; pass lms.session.LMSSessionRunHook()"
KNOWN = (BEFORE, EAGER, AROUND, CLUSTERS, FINALIZED)

CASES: dict[str, list[str]] = {
    "fit traced before": [BEFORE],
    "fit": [],
    "fit run eagerly": [EAGER],
    "eager loop": [EAGER],
    "eager fit of a scale": [],
    "tape around a function": [AROUND],
    "saliency and evaluation": [],
    "jit after enable": [CLUSTERS],
    "finalized session": [FINALIZED],
    "edited by an earlier LMS": [],
    "traced again between two LMS": [BEFORE],
}


@pytest.fixture(scope="module", params=["keras3", "tf_keras"])
def seen(request: pytest.FixtureRequest) -> dict[str, Any]:
    pytest.importorskip("tensorflow")
    if request.param == "tf_keras":
        pytest.importorskip("tf_keras")
    return run_job("unseen_job.py", request.param)


@pytest.mark.parametrize("case", CASES)
def test_told_once_and_only_there(case: str, seen: dict[str, Any]) -> None:
    assert [mark for text in seen[case] for mark in KNOWN if mark in text] == CASES[case], seen[case]
