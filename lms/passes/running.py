"""Run passes over the work on a graph, and time them."""

import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Protocol

from lms.passes.work import Work


class Pass(Protocol):
    """One pass over a graph."""

    @property
    def name(self) -> str:
        """The pass's name in the report of times."""

    def requires(self, work: Work) -> bool:
        """Tell whether the pass has anything to do."""

    def apply(self, work: Work) -> Work:
        """Return the work with what this pass adds to it."""


def run_passes(passes: Iterable[Pass], work: Work) -> Work:
    """Run and time those passes that find something to do."""
    for one in passes:
        if one.requires(work):
            began = time.perf_counter()
            work = one.apply(work)
            spent = work.seconds.get(one.name, 0.0) + time.perf_counter() - began
            work = replace(work, seconds={**work.seconds, one.name: spent})
    return work
