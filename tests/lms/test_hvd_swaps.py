"""Swapping under two real Horovod ranks: the ranks agree, and agree with training that does not swap."""

import importlib.util
import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.tensorflow, pytest.mark.ranks]

ROOT = Path(__file__).resolve().parents[2]
PLAIN = {"TF_ENABLE_ONEDNN_OPTS": "0"}
"""Other kernels end the process where memory runs out."""
LIMITED = {"TF_CPU_BFC_MEM_LIMIT_IN_MB": "96", "HOROVOD_FUSION_THRESHOLD": str(1 << 20), **PLAIN}
JOB = Path(__file__).with_name("hvd_swap_job.py")


def run_ranks(*arguments: str, **environ: str) -> list[dict[str, Any]]:
    if importlib.util.find_spec("horovod") is None:
        pytest.skip("Horovod is not installed here (scripts/setup.py builds it)")
    lmsrun = [sys.executable, str(ROOT / "lmsrun" / "__main__.py"), "run", "-np", "2", "--oversubscribe"]
    done = subprocess.run(
        [*lmsrun, "--no-lms", "--no-tag-output", str(JOB), *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3", **environ},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    ranks = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert sorted(rank["rank"] for rank in ranks) == [0, 1]
    return ranks


def test_two_ranks_train_the_same_bits_with_and_without_swapping() -> None:
    ranks = run_ranks()
    assert all(rank["tensors"] and min(rank["tensors"]) > 5 for rank in ranks)
    assert len({rank[when] for rank in ranks for when in ("before", "after")}) == 1


@pytest.mark.parametrize(("asked", "mib"), [(24, 32), (None, 128)])
def test_the_plan_counts_horovods_fusion_buffer(asked: int | None, mib: int) -> None:
    default = {} if asked is None else {"HOROVOD_FUSION_THRESHOLD": str(asked << 20)}
    for rank in run_ranks("peaks", **default):
        assert all(mib << 20 <= base < mib + 8 << 20 for base in rank["base"]), rank
        assert rank["planned"] == pytest.approx(rank["measured"], rel=0.1), rank


@pytest.mark.parametrize("kind", ["retried", "retried later", "retried with variables on the host"])
def test_a_rank_that_runs_out_of_memory_at_first_is_planned_again(kind: str) -> None:
    """Its plan runs apart from the other rank first, which has received nothing of it."""
    ranks = {rank["rank"]: rank for rank in run_ranks(kind, **LIMITED)}
    assert len({rank[when] for rank in ranks.values() for when in ("before", "after")}) == 1
    assert not ranks[0]["retries"] and ranks[1]["retries"], ranks
    assert all(rank["steps"] == 8 for rank in ranks.values())
    assert any("the first step ran out of memory" in text for text in ranks[1]["said"])


def test_only_the_runs_apart_have_a_graph_without_the_exchange() -> None:
    limited = {**LIMITED, "TF_CPU_BFC_MEM_LIMIT_IN_MB": "64", "HOROVOD_FUSION_THRESHOLD": "0"}
    for rank in run_ranks("left", **limited):
        assert "LMS: the step ran out of memory" in rank["caught"] and rank["undone"], rank
        assert rank["sums"] == [3, 3, 3, 3] and rank["apart"] == 1, rank


@pytest.mark.parametrize(("kind", "apart"), [("asserted", 1), ("folded", 0)])
def test_a_step_that_fails_without_other_ranks_runs_with_them(kind: str, apart: int) -> None:
    """One that TensorFlow exchanges constants for while it optimizes it is not tried without them."""
    first, second = run_ranks(kind)
    assert first["apart"] == second["apart"] == apart
    assert first["losses"] == second["losses"] and len({*first["losses"]}) == 3
    assert first["trained"] == second["trained"] and len(first["tensors"]) == 1, first


def test_two_ranks_train_in_segments_that_xla_compiles() -> None:
    first, second = sorted(run_ranks("segments"), key=lambda rank: int(rank["rank"]))
    least = 1 if version("tensorflow").startswith("2.15") else 2  # Keras 2 makes a smaller step of it
    for rank in (first, second):
        assert min(rank["segments"]) >= least and rank["executed"] == rank["swapped"] != []
        assert rank["losses"][-1] < rank["losses"][0]
    assert first["trained"] == second["trained"]
