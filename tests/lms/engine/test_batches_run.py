"""Room for the batches of an input pipeline, in a step that trains near the limit of the CPU device."""

import pytest
from child_job import run_job

pytestmark = pytest.mark.tensorflow
BATCH_BYTES = 32 * 32 * 32 * 3 * 4
MIB = 1 << 20


def test_batches_have_room_and_a_second_plan_counts_it_once() -> None:
    pytest.importorskip("tensorflow")
    pool = {"TF_CPU_ALLOCATOR_USE_BFC": "true", "TF_CPU_BFC_MEM_LIMIT_IN_MB": "24"}
    found = run_job("batches_job.py", CUDA_VISIBLE_DEVICES="", **pool)
    assert len(found["batches"]) >= 2 and all(found["swaps"]), found
    assert all(batches >= 3 for batches in found["batches"]), found
    assert found["kept_bytes"] == max(found["batches"]) * BATCH_BYTES
    first, *later = found["limits"]
    assert all(abs(limit - first) < BATCH_BYTES for limit in later), "what keeps the room apart is in both"
