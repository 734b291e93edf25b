"""Runs the jobs of this folder, and says what is wrong with what they found."""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from child_job import ROOT, run_job

ALL = os.environ.pop("LMS_ALL_BITS", "") == "1"
"""Run every case, which takes hours. Taken out of the environment: LMS warns of names it does not know."""
KERASES = ("3", "2")

JOB = Path(__file__).with_name("bits_job.py")
RUN_RANKS = (sys.executable, str(ROOT / "lmsrun" / "__main__.py"), "run", "-np", "2", "--oversubscribe")
MODES = ("plain", "all", "budget")


def keras_environ(keras: str) -> dict[str, str]:
    """What chooses a Keras; 2 is tf_keras, or that of TensorFlow 2.15."""
    return {"TF_USE_LEGACY_KERAS": "1" if keras == "2" else "0"}


def skip_without(keras: str) -> None:
    """Skip where there is no TensorFlow, or not this Keras with it."""
    pytest.importorskip("tensorflow")
    wanted = "tf_keras" if keras == "2" else "keras"
    if importlib.util.find_spec(wanted) is None:
        pytest.skip(f"{wanted} is not installed")


def cases_of(keras: str) -> dict[str, dict[str, Any]]:
    """All cases that a Keras has, with what each needs."""
    return run_job("bits/bits_job.py", "--list", **keras_environ(keras))


def train(keras: str, *cases: str, steps: int | None = None, modes: Sequence[str] = MODES) -> dict[str, Any]:
    """Train cases in one process; by case what ``bits_job.py`` found."""
    asked = ["--modes", ",".join(modes), *(["--steps", str(steps)] if steps else [])]
    found = run_job("bits/bits_job.py", *asked, *cases, **keras_environ(keras))
    del found["rank"]
    return found


def train_on_ranks(case: str, steps: int, keras: str = "3") -> dict[str, Any]:
    """Train a case on two Horovod ranks; by rank what it found."""
    if importlib.util.find_spec("horovod") is None:
        pytest.skip("Horovod is not installed here (scripts/setup.py builds it)")
    asked = ["--modes", "plain,all", "--steps", str(steps), case]
    done = subprocess.run(
        [*RUN_RANKS, "--no-lms", "--no-tag-output", str(JOB), *asked],
        env={**os.environ, **keras_environ(keras), "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert sorted(one["rank"] for one in found) == [0, 1]
    return {f"rank {one['rank']}": one[case] for one in found}


def faults(found: dict[str, Any], needs_swaps: bool = True) -> list[str]:
    """One line for each thing that is wrong with trained cases."""
    return [f"{case}, {text}" for case, seen in found.items() for text in _faults(seen, needs_swaps)]


def _faults(seen: dict[str, Any], needs_swaps: bool) -> Iterator[str]:
    plain = seen["plain"]
    if not plain["finite"]:
        yield "plain: there are numbers that are not finite, which says nothing"
    for mode, one in seen.items():
        if "error" in one:
            yield f"{mode}: {one['error']}"
        elif one["digest"] != plain["digest"]:
            yield f"{mode}: other bits, {one['apart']}"
        elif mode == "all" and needs_swaps and not (one["tensors"] and one["swap_outs"]):
            yield f"{mode}: nothing is swapped, {one['why']}"
