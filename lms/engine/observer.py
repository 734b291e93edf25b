"""The interface of a callback or hook that follows the planning: IBM's classes implement it."""

from collections.abc import Sequence
from typing import Protocol

from lms.ir.name_filters import Unmatched
from lms.report.stats import GraphStats


class Guest(Protocol):
    """A callback or hook of the user's that has asked for LMS."""

    refusal: str
    """Why no graph is to be edited; empty where they are."""

    def is_over(self) -> bool:
        """Tell whether its training has ended, also by an error that it was not told of."""

    def leave(self) -> None:
        """Remove this guest, and pause LMS where it is on for this guest alone."""

    def unmatched(self, names: Sequence[Unmatched]) -> None:
        """Take note of the names in the configuration's filters that a graph does not have.

        Raises:
            LMSArgumentError: If the graph is not to be edited then.
        """

    def planned(self, stats: GraphStats) -> None:
        """Take note that a graph has been planned, and edited where that helps."""
