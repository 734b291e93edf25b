"""What trains with LMS ends in the same bits as without it, at TensorFlow's own settings."""

from typing import Any

import pytest
from bits_runs import ALL, KERASES, cases_of, faults, skip_without, train, train_on_ranks

pytestmark = pytest.mark.tensorflow

STEPS = 3
QUICK = {
    "3": ("mixed_bfloat16", "encoder", "vae", "penalty", "shared terms", "session"),
    "2": ("mixed_float16", "steps_per_execution", "dataset loop", "noise"),
}


@pytest.mark.skipif(ALL, reason="all cases are run, these among them")
@pytest.mark.parametrize("keras", KERASES)
def test_a_few_cases_end_in_the_same_bits(keras: str) -> None:
    skip_without(keras)
    assert faults(train(keras, *QUICK[keras], steps=STEPS)) == []


@pytest.mark.skipif(ALL, reason="all cases are run, these among them")
def test_what_ends_without_a_batch_or_draws_from_a_kernel_ends_in_the_same_bits() -> None:
    skip_without("3")
    cases = train("3", "unknown length", "grown noise", steps=4, modes=("plain", "all"))
    assert faults(cases) == []


@pytest.mark.skipif(ALL, reason="all cases are run, this among them")
def test_two_devices_end_in_the_same_bits() -> None:
    skip_without("3")
    assert faults(train("3", "mirrored", steps=STEPS, modes=("plain", "all"))) == []


@pytest.mark.ranks
def test_two_ranks_end_in_the_same_bits() -> None:
    skip_without("3")
    found = train_on_ranks("ranks", STEPS)
    assert faults(found) == []
    assert len({one["plain"]["digest"] for one in found.values()}) == 1


@pytest.mark.skipif(not ALL, reason="hours; set LMS_ALL_BITS=1")
@pytest.mark.parametrize("keras", KERASES)
def test_all_cases_end_in_the_same_bits(keras: str) -> None:
    skip_without(keras)
    wrong: dict[str, Any] = {}
    for name, needs in cases_of(keras).items():
        if needs["ranks"] > 1:
            continue
        try:
            if lines := faults(train(keras, name), needs["swaps"]):
                wrong[name] = lines
        except AssertionError as error:  # that job ended badly; the others tell more
            wrong[name] = str(error)[-500:]
    assert wrong == {}
