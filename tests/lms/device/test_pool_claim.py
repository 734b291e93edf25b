"""The pool of a limited CPU device in one piece, in the real allocator and in the simulated one."""

from functools import wraps

import pytest
from child_job import run_job

MIB = 1 << 20


@pytest.mark.tensorflow
@pytest.mark.parametrize("when", ["claimed", "session", "late", "late session"])
def test_a_claimed_pool_is_one_region_and_another_grows_piece_by_piece(when: str) -> None:
    """TensorFlow has made its devices, or a session has run: then the pool grows, and plans are told so."""
    is_early = "late" not in when
    bfc = {"TF_CPU_ALLOCATOR_USE_BFC": "true", "TF_CPU_BFC_MEM_LIMIT_IN_MB": "64"}
    seen = run_job("pool_claim_job.py", when, **bfc)
    assert seen["whole"] is seen["foreseen"] is is_early
    assert when == "late session" or seen["fits"] is is_early
    assert seen["still"] is seen["whole"], "it lasts as long as the process"
    assert seen["grows"] is not is_early
    assert seen["in_use"] < MIB, "nothing is kept"


@pytest.mark.tensorflow
@pytest.mark.parametrize("limit_mb", [3000, 4100])
def test_a_pool_of_gigabytes_is_claimed_too(limit_mb: int) -> None:
    """TensorFlow states sizes in 32 bits."""
    bfc = {"TF_CPU_ALLOCATOR_USE_BFC": "true", "TF_CPU_BFC_MEM_LIMIT_IN_MB": str(limit_mb)}
    seen = run_job("pool_claim_job.py", "claimed", str(limit_mb - 8), **bfc)
    assert seen["whole"] and seen["fits"]
    assert seen["peak"] < 64 * MIB, "the pool is no part of what the program takes"


@pytest.mark.tensorflow
def test_growth_that_is_forced_goes_before_what_the_program_says() -> None:
    pytest.importorskip("tensorflow")
    from lms.device.memory_pool import PoolClaim

    assert PoolClaim({"TF_FORCE_GPU_ALLOW_GROWTH": "true"}).leaves_growing("GPU")
    assert not PoolClaim({"TF_FORCE_GPU_ALLOW_GROWTH": "false"}).leaves_growing("GPU")


@pytest.mark.tensorflow
def test_a_pool_without_limit_is_not_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorflow")
    from tensorflow.python.eager import context

    from lms.device import memory_pool

    plain = context.Context.ensure_initialized
    claim = memory_pool.PoolClaim({"TF_CPU_BFC_MEM_LIMIT_IN_MB": "64"})
    claim.install()
    assert context.Context.ensure_initialized is plain
    monkeypatch.setattr(memory_pool, "tensorflow_is_initialised", lambda: False)
    limited = {"TF_CPU_ALLOCATOR_USE_BFC": "true", "TF_CPU_BFC_MEM_LIMIT_IN_MB": "64"}
    claim = memory_pool.PoolClaim(limited)
    claim.install()
    assert context.Context.ensure_initialized is not plain
    claim.uninstall()
    assert context.Context.ensure_initialized is plain and not claim.is_whole
    claim.install()
    theirs = wraps(plain)(lambda made: plain(made))
    monkeypatch.setattr(context.Context, "ensure_initialized", theirs)
    claim.uninstall()
    assert context.Context.ensure_initialized is theirs, "who has wrapped it since stays"
