"""Who hears of every graph that is looked at: IBM's classes."""

from collections.abc import Sequence
from typing import Protocol

from lms.ir.name_filters import Unmatched
from lms.report.stats import GraphStats


class Guest(Protocol):
    """A callback or hook of the user's that has asked for LMS."""

    refusal: str
    """Why no graph is to be edited; empty where they are."""

    def is_over(self) -> bool:
        """Whether its training has ended, by an error that nobody told it of."""

    def leave(self) -> None:
        """Go, and pause LMS where it is on for this guest alone."""

    def unmatched(self, names: Sequence[Unmatched]) -> None:
        """What filters of the configuration name and a graph does not have.

        Raises:
            LMSArgumentError: If the graph is not to be edited then.
        """

    def planned(self, stats: GraphStats) -> None:
        """A graph has been planned, and edited where that helps."""
