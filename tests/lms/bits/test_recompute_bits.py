"""What is recomputed ends in the same bits as what is kept: dropout, normalisations, attention."""

import pytest
from bits_runs import ALL, cases_of, faults, skip_without, train

pytestmark = pytest.mark.tensorflow

MODES = ("plain", "recompute", "hybrid")
STEPS = 2


def test_recomputed_steps_end_in_the_same_bits() -> None:
    skip_without("3")
    found = train("3", "encoder", "residual", steps=STEPS, modes=MODES)
    assert faults(found) == []
    for case, seen in found.items():
        assert seen["recompute"]["repeated"] and not seen["recompute"]["tensors"], case
        assert seen["hybrid"]["repeated"] and seen["hybrid"]["tensors"], case
        planned = seen["recompute"]["planned_peak_bytes"]  # Keras 2.15 leaves the encoder's sizes open
        assert planned is None or planned < seen["plain"]["peak_bytes"], case
    assert found["residual"]["recompute"]["planned_peak_bytes"] is not None


@pytest.mark.skipif(not ALL, reason="hours; set LMS_ALL_BITS=1")
@pytest.mark.parametrize("keras", ("3", "2"))
def test_all_recomputed_cases_end_in_the_same_bits(keras: str) -> None:
    skip_without(keras)
    wrong = {}
    for name, needs in cases_of(keras).items():
        if needs["ranks"] == 1 and (lines := faults(train(keras, name, steps=STEPS, modes=MODES))):
            wrong[name] = lines
    assert wrong == {}
