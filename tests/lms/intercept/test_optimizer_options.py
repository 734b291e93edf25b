"""The program's own options of TensorFlow's optimizer stay what they are while LMS is on."""

from typing import Any

import pytest
from child_job import run_job

pytestmark = pytest.mark.tensorflow


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    pytest.importorskip("tensorflow")
    return run_job("options_job.py")


@pytest.mark.parametrize("asked", ["None", "False", "True"])
def test_the_options_that_a_program_reads_stay(seen: dict[str, Any], asked: str) -> None:
    before, meanwhile, after = seen[asked]["options"]
    assert before == meanwhile == after


@pytest.mark.parametrize(("asked", "arithmetic"), [("None", "DEFAULT"), ("False", "OFF"), ("True", "ON")])
def test_a_planned_step_runs_with_options_of_its_own(
    seen: dict[str, Any], asked: str, arithmetic: str
) -> None:
    before, meanwhile, after = seen[asked]["calls"]
    assert meanwhile == ["NO_MEM_OPT", arithmetic]
    assert before == after == ["DEFAULT_MEM_OPT", "DEFAULT"]
