"""Functions that XLA compiles whole are copied without XLA."""

from typing import Any

import pytest
from child_job import run_job

pytestmark = pytest.mark.tensorflow


@pytest.fixture(scope="module")
def made() -> dict[str, Any]:
    pytest.importorskip("tensorflow")
    return run_job("compiled_functions_job.py")


def test_only_functions_with_a_training_step_are_copied(made: dict[str, Any]) -> None:
    assert made["look"] is None and made["plain"] is None
    assert {"MatMul", "AssignSubVariableOp"} <= {*made["train"]} == {*made["outer"]}
    assert made["train again"]


@pytest.mark.parametrize("name", ["train", "outer"])
def test_a_copy_computes_the_same(name: str, made: dict[str, Any]) -> None:
    original, copy = made[f"{name} runs"]
    assert copy == pytest.approx(original, rel=1e-5)


def test_a_copy_goes_with_its_function(made: dict[str, Any]) -> None:
    assert made["copies"] > 0 and made["copies at last"] == 0


def test_a_copy_has_nothing_for_xla_and_its_loops_become_ops_of_the_graph(made: dict[str, Any]) -> None:
    assert made["outer attributes"] == []
    assert set(made["train attributes"]) == {"_lower_using_switch_merge"}
