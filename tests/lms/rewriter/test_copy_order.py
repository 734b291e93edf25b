"""When executors begin copies."""

import pytest
from child_job import run_job

pytestmark = pytest.mark.tensorflow


@pytest.mark.parametrize("how", ["none", "reshaped"])
def test_a_thread_copies_a_tensor_out_before_it_goes_on(how: str) -> None:
    """Else tensors wait for their copies while one thread runs the forward pass, and fill the device.

    A view is cheap: a thread runs it, and would go on with what reads it.
    """
    limit = {"TF_CPU_ALLOCATOR_USE_BFC": "true", "TF_CPU_BFC_MEM_LIMIT_IN_MB": "44"}
    found = run_job(
        "rewriter/copy_order_job.py", how, TF_NUM_INTEROP_THREADS="1", TF_ENABLE_ONEDNN_OPTS="0", **limit
    )
    large = [name for name in found["ran"] if name.startswith(("Conv2D", "Tanh")) and "/delay_" not in name]
    copies = [place for place, name in enumerate(large) if name.endswith("/swap_out")]
    assert len(copies) == found["tensors"] > 1
    assert [large[place - 1] for place in copies] == [large[place].partition("/")[0] for place in copies]
