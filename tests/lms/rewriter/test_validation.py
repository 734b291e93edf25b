"""What TensorFlow would refuse, merge in another way or die of is found before it gets the graph."""

import pytest
from child_job import run_job

pytestmark = pytest.mark.tensorflow

EXPECTED = {
    "as it was": "",
    "added": "",
    "one name": "one name",
    "no device": "copy has no device",
    "part of a device": "copy has no device, or a part of a name: '/device:CPU:0'",
    "unknown op": "'NoSuchOp', which this TensorFlow does not know",
    "two inputs": "copy reads 2 tensors; needed 1",
    "no type": "copy has no attribute T",
    "no value": "copy has no attribute num_outs, or no value for it",
    "reads another type": "conv reads copy, which is of another type than it takes",
    "no such output": "conv reads copy:5, an output that is not there",
    "lost input": "aside reads 0 tensors; needed 1",
    "no node": "conv reads nobody, which is not there",
    "no output": "conv reads images:1, an output that is not there",
    "other type": "filter_slope reads images, which is of another type than it takes",
    "behind": "bias reads conv behind a control input",
    "renamed": "reads slope, which is not there",
    "makes other types": "filter_slope makes other types than its readers take",
    "circle": "would wait for itself",
    "another frame": "bias would wait for what runs in another loop",
    "parted": "no longer merge filter_slope and bias_slope",
    "both wait": "",
    "parted, without oneDNN": "",
    "fatal": "bias would wait for the same as the convolution before it",
    "fatal, without oneDNN": "",
}


@pytest.fixture(scope="module")
def said() -> dict[str, str]:
    pytest.importorskip("tensorflow")
    return run_job("validation_job.py")


@pytest.mark.parametrize("case", EXPECTED)
def test_a_broken_edit_is_refused_and_told(said: dict[str, str], case: str) -> None:
    assert EXPECTED[case] in said[case]
    assert bool(EXPECTED[case]) == bool(said[case])


def test_every_case_is_looked_at(said: dict[str, str]) -> None:
    assert said.keys() == EXPECTED.keys()
