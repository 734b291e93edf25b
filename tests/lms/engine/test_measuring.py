"""What a profile is not kept of."""

from types import SimpleNamespace

import pytest

from lms.errors import LMSError
from lms.ir.graph import GraphBuilder
from lms.planner.segments import SEGMENT


@pytest.mark.tensorflow
def test_a_step_in_segments_has_no_times_of_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorflow")
    from lms.engine import measuring

    build = GraphBuilder()
    build.add("dense/segment", SEGMENT, outputs=[256])
    planned = SimpleNamespace(name="step", graph=build.build(()), unedited=build.build(()))
    collector = SimpleNamespace(planned={"step": planned})
    engine = SimpleNamespace(report=lambda: None, books=SimpleNamespace(collector=collector))
    monkeypatch.setattr(measuring, "op_seconds", lambda trace: {})
    with pytest.raises(LMSError, match="step runs in segments that XLA compiles.* xla='off'"):
        measuring.keep(engine, b"")  # type: ignore[arg-type]
