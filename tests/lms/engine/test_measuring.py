"""What a profile is not kept of."""

from types import SimpleNamespace
from typing import Any

import pytest

from lms.errors import LMSError
from lms.ir.graph import Graph, GraphBuilder
from lms.planner.segments import SEGMENT


@pytest.mark.tensorflow
def test_a_step_in_segments_has_no_times_of_ops() -> None:
    pytest.importorskip("tensorflow")
    from lms.engine import measuring

    build = GraphBuilder()
    build.add("dense/segment", SEGMENT, outputs=[256])
    with pytest.raises(LMSError, match="step runs in segments that XLA compiles.* xla='off'"):
        measuring.keep(engine_with(build.build(())), b"")


@pytest.mark.tensorflow
def test_a_step_that_did_not_run_in_the_block_is_not_kept() -> None:
    pytest.importorskip("tensorflow")
    from lms.engine import measuring

    build = GraphBuilder()
    build.add("dense/MatMul", "MatMul", outputs=[256])
    with pytest.raises(LMSError, match="no training step ran"):
        measuring.keep(engine_with(build.build(()), "__inference_step_7"), b"")


def engine_with(graph: Graph, function: str = "") -> Any:
    """Return what an engine is asked for, with one planned step, no function of which has run."""
    planned = SimpleNamespace(name="step", graph=graph, unedited=graph, function=function)
    return SimpleNamespace(
        report=lambda: None,
        books=SimpleNamespace(collector=SimpleNamespace(planned={"step": planned})),
        resources=SimpleNamespace(devices=[SimpleNamespace(type="CPU")]),
        steps=SimpleNamespace(functions_run=set()),
    )
