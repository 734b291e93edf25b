"""The work on a step, as the passes hand it on."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.tensorflow


def test_the_store_holds_what_is_swapped_and_what_streams() -> None:
    """Also for a kept edit, of which nothing else is known."""
    pytest.importorskip("tensorflow")
    from lms.passes.work import Work
    from lms.rewriter.streaming import Streamed

    unused: Any = None
    decision: Any = SimpleNamespace(plan=SimpleNamespace(bytes_out=1))
    streamed = Streamed(nbytes=2, bytes_out=4)
    work = Work(unused, unused, unused, streamed=streamed, decision=decision)
    assert work.stored_bytes == 7
    assert replace(work, decision=None).stored_bytes == 6


@pytest.mark.parametrize(
    ("peak_bytes", "is_empty", "feasible", "lacks"),
    [
        (101, False, True, True),
        (100, False, True, False),
        (101, True, True, False),
        (101, False, False, False),
    ],
)
def test_only_a_plan_within_its_budget_lacks_room_in_pieces(
    peak_bytes: int, is_empty: bool, feasible: bool, lacks: bool
) -> None:
    """For a step that was left as it is, plans for less memory have not been tried."""
    pytest.importorskip("tensorflow")
    from lms.device.device import Device
    from lms.passes.work import Work

    unused: Any = None
    task: Any = SimpleNamespace(limit_bytes=None)
    plan = SimpleNamespace(is_empty=is_empty, feasible=feasible)
    decision: Any = SimpleNamespace(plan=plan, peak_bytes=peak_bytes)
    work = Work(task, Device("GPU:0", 100), unused, decision=decision)
    assert work.lacks_room_in_pieces is lacks


@pytest.mark.parametrize(
    ("op_type", "fills"), [("Relu", True), ("HorovodAllreduce", False), ("CollectiveReduceV2", False)]
)
def test_a_step_that_talks_to_other_ranks_gets_no_fillers(
    op_type: str, fills: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """These decide when its buffers are made and freed."""
    pytest.importorskip("tensorflow")
    from lms.config import LMSConfig
    from lms.device.device import Device
    from lms.ir.graph import GraphBuilder
    from lms.passes import planning
    from lms.passes.work import Work

    allowed = []
    monkeypatch.setattr(planning, "decide", lambda *arguments: allowed.append(arguments[-1].fills))
    unused: Any = None
    grows: Any = SimpleNamespace(leaves_growing=lambda device_type: False)
    profiles: Any = lambda: SimpleNamespace(find=lambda graph: {})  # noqa: E731
    planned_by = planning.Planning(None, grows, unused, profiles, lambda: True, lambda: True)
    task: Any = SimpleNamespace(config=LMSConfig(), compiled=False, may_be_whole=False)
    table: Any = SimpleNamespace(types=["Conv2D", op_type])
    work = Work(task, Device("CPU:0", 1 << 20), unused, table=table, graph=GraphBuilder().build())
    planned_by.apply(work)
    assert allowed == [fills]
