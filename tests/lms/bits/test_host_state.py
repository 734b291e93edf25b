"""Optimizer state and weights that lie on the host between steps: the same bits, in less memory."""

from importlib.metadata import version
from typing import Any

import pytest
from bits_runs import keras_environ, skip_without
from child_job import run_job

pytestmark = pytest.mark.tensorflow
LIMIT_MB = 21
CASES = {
    "3": ("adamw", "momentum", "clipped", "accumulated", "scaled"),
    "2": ("v1_adam", "v1_momentum", "scaled"),
}


def train(keras: str, *asked: str, **environ: str) -> dict[str, Any]:
    return run_job("bits/host_state_job.py", keras, *asked, **keras_environ(keras), **environ)


@pytest.mark.parametrize("keras", ("3", "2"))
def test_every_optimizer_ends_in_the_same_bits(keras: str) -> None:
    skip_without(keras)
    for name, found in train(keras, *CASES[keras]).items():
        assert len({one["digest"] for one in found.values()}) == 1, name
        for mode in ("state", "host"):
            seen = found[mode]
            assert seen["state"] and bool(seen["weights"]) == (mode == "host"), (name, mode)
            assert seen["saved"] and seen["warnings"] == [], (name, mode)


@pytest.mark.parametrize("mode", ("host", "auto"))
@pytest.mark.parametrize("keras", ("3", "2"))
def test_a_transformer_trains_whose_variables_are_much_larger_than_the_limit(keras: str, mode: str) -> None:
    """tf_keras makes the slots while the first step is traced, and knows no size of Adam's."""
    skip_without(keras)
    plain = train(keras, "transformer", "plain")["transformer"]["plain"]
    limit = {"TF_CPU_BFC_MEM_LIMIT_IN_MB": str(LIMIT_MB)}
    seen = train(keras, "transformer", mode, **limit)["transformer"][mode]
    assert seen["digest"] == plain["digest"]
    assert seen["bytes"] == plain["bytes"] >= 2.5 * (LIMIT_MB << 20)
    planned, ran = seen["copies_out"]
    assert planned == ran > 0
    assert seen["saved"]
    if mode == "host":
        assert seen["left_bytes"] < seen["bytes"] / 10
    if keras == "3" and version("keras").startswith("3."):  # TensorFlow 2.15's own is another
        assert seen["peak_bytes"] <= 1.3 * seen["planned_peak_bytes"]


@pytest.mark.parametrize(("limit_mb", "moves"), [(40, True), (64, False)])
def test_by_default_the_state_goes_to_the_host_once_a_step_does_not_fit(limit_mb: int, moves: bool) -> None:
    """Of the 55 MiB of all variables two thirds are the optimizer's state."""
    limit = {"TF_CPU_BFC_MEM_LIMIT_IN_MB": str(limit_mb)}
    seen = train("3", "transformer", "auto", **limit)["transformer"]["auto"]
    assert [bool(seen["state"]), bool(seen["weights"])] == [moves, False]
    assert seen["copies_out"] == [seen["state"]] * 2
    told = "the host between steps from now on; optimizer_state='device' and variables='device' keep them"
    assert sum(told in warning for warning in seen["warnings"]) == moves
