"""By default XLA compiles a step as one where it fits; where it does not, the step runs without XLA."""

from typing import Any

import pytest
from child_job import run_job

pytestmark = pytest.mark.tensorflow


def job(way: str, policy: str = "auto", budget: str = "-", case: str = "-") -> dict[str, Any]:
    return run_job("segments_job.py", way, policy, budget, case, "900")


@pytest.fixture(scope="module")
def without() -> dict[str, Any]:
    pytest.importorskip("tensorflow")
    return job("without")


def test_a_step_that_fits_is_compiled_as_without_lms(without: dict[str, Any]) -> None:
    made = job("default")
    assert made["whole"] and not made["swapped"] and not made["warnings"] and made["flags"] == ""
    assert (made["losses"], made["bits"]) == (without["losses"], without["bits"])


def test_a_step_that_does_not_fit_runs_as_with_xla_off() -> None:
    made, off = job("default", "budget", "16"), job("off", "budget", "16")
    assert made["swapped"] and not made["whole"] and not made["segments"]
    assert (made["losses"], made["bits"]) == (off["losses"], off["bits"])
    assert made["swapped"] == off["swapped"] == made["executed"]
    (text,) = made["warnings"]
    assert "train runs without XLA: as one it may take" in text and "where 14.4 MiB may be used" in text


def test_a_step_that_took_more_than_it_may_runs_without_xla_from_then_on() -> None:
    made = job("default", "budget", "18", "hopeful")
    assert made["whole"] and made["executed"] == made["swapped"] > 0 and not made["segments"]
    assert [text for text in made["warnings"] if "train runs without XLA from now on: as one it took" in text]


def test_larger_batches_that_do_not_fit_run_without_xla() -> None:
    made = job("default", "budget", "72", "growing")
    assert made["whole"] and made["swapped"] and not made["segments"]


def test_what_xla_cannot_compile_runs_without_it() -> None:
    made = job("default", case="calls_numpy")
    assert not made["whole"] and not made["segments"]
    assert not [text for text in made["warnings"] if "XLA" in text]


def test_policy_all_runs_without_xla(without: dict[str, Any]) -> None:
    made = job("default", "all")
    assert made["swapped"] and made["losses"] == pytest.approx(without["losses"], rel=1e-5)
    (text,) = made["warnings"]
    assert "XLA is off for train: policy 'all' swaps what fits, too, and no swap would survive" in text


@pytest.mark.parametrize("way", ["default", "auto"])
@pytest.mark.parametrize("order", ["train,evaluate", "evaluate,train,evaluate"])
def test_variables_may_still_move_to_the_host(order: str, way: str) -> None:
    """Run without XLA from then on what it has compiled before: it would find no variables there."""
    pytest.importorskip("tensorflow")
    ample, tight = (run_job("whole_job.py", order, str(limit), way) for limit in (300, 54))
    assert ample["whole"] and not ample["streamed"] and not ample["warnings"]
    assert tight["streamed"] and not tight["whole"] and tight["measured"] < 54 << 20
    assert tight["losses"] == pytest.approx(ample["losses"], rel=1e-5)
    assert [text for text in tight["warnings"] if "lie on the host between steps from now on" in text]


def test_what_xla_has_compiled_finds_variables_on_the_host_after_lms_is_off() -> None:
    made = run_job("whole_job.py", "evaluate,train,disable,evaluate,enable,train", "54", "default")
    assert made["streamed"]
    kept = run_job("whole_job.py", "evaluate,train,evaluate,train", "300", "default")
    assert made["losses"] == pytest.approx(kept["losses"], rel=1e-5)


def test_a_step_that_was_estimated_is_still_compiled() -> None:
    made = run_job("whole_job.py", "estimate,train", "300", "default")
    assert made["whole"] and not made["warnings"]
