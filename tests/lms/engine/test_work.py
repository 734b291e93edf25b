"""The work on a step, as the passes hand it on."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.tensorflow


def test_the_store_holds_what_is_swapped_and_what_streams() -> None:
    """Also for a kept edit, of which nothing else is known."""
    pytest.importorskip("tensorflow")
    from lms.engine.work import Work
    from lms.rewriter.streaming import Streamed

    unused: Any = None
    decision: Any = SimpleNamespace(plan=SimpleNamespace(bytes_out=1))
    streamed = Streamed(nbytes=2, bytes_out=4)
    work = Work(unused, unused, unused, streamed=streamed, decision=decision)
    assert work.stored_bytes == 7
    assert replace(work, decision=None).stored_bytes == 6
