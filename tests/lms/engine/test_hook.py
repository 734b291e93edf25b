"""LMS on real training: the same bits, less memory, and what it says."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import warm_python

ROOT = Path(__file__).resolve().parents[3]
JOB = Path(__file__).with_name("hook_job.py")

pytestmark = [pytest.mark.tensorflow, pytest.mark.extras]


@pytest.fixture(scope="module", params=["keras3", "tf_keras"])
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    pytest.importorskip("tensorflow")
    if request.param == "tf_keras":
        pytest.importorskip("tf_keras")
    picture = tmp_path_factory.mktemp("plot") / "memory.png"
    legacy = "1" if request.param == "tf_keras" else "0"
    environ = {"PYTHONPATH": str(ROOT), "TF_NUM_INTEROP_THREADS": "1", "TF_USE_LEGACY_KERAS": legacy}
    done = warm_python.run([str(JOB), request.param, str(picture)], {**os.environ, **environ}, timeout_s=600)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {**found, "picture": picture}


def test_weights_are_bit_identical_after_twenty_steps(seen: dict[str, Any]) -> None:
    for name, (weights, _) in seen["off"].items():
        for policy in ("all", "budget"):
            assert seen[policy][name][0] == weights, (policy, name)


def test_the_measured_peak_falls(seen: dict[str, Any]) -> None:
    """By how much is the benchmark's to say: without a plan the executor's order differs from run to run."""
    for name, (_, before) in seen["off"].items():
        for policy in ("all", "budget"):
            assert seen[policy][name][1] < 0.9 * before, (policy, name)


def test_a_step_is_edited_once_and_the_report_counts(seen: dict[str, Any]) -> None:
    report = seen["all_report"]
    assert report["transport"] == "host"
    assert report["graphs"]
    for name, edited, tensors, swap_ins, added, why in report["graphs"]:
        assert edited and name in report["text"]
        assert 0 < tensors <= swap_ins
        assert added >= tensors + swap_ins
        assert why.startswith(f"{tensors} tensors swapped")
    assert "measured peak" in report["text"]


def test_a_budget_moves_fewer_bytes_than_all(seen: dict[str, Any]) -> None:
    pairs = zip(seen["budget_report"]["bytes_out"], seen["all_report"]["bytes_out"], strict=True)
    assert all(budget < everything for budget, everything in pairs)


def test_swaps_survive_grappler_and_the_plot_is_drawn(seen: dict[str, Any]) -> None:
    if "grappler" not in seen:
        pytest.skip("looked at once, with Keras 3")
    *_, (_, _, tensors, swap_ins, _, _) = [one for one in seen["all_report"]["graphs"] if one[0] == "train"]
    assert seen["grappler"] == tensors + swap_ins
    assert seen["picture"].read_bytes().startswith(b"\x89PNG")
