"""The guests that may have an engine for a while, as they are told of its plans.

Here because they are told in the words of the report, and passes hand them on.
"""

from collections.abc import Sequence
from typing import Protocol

from lms.ir.name_filters import Unmatched
from lms.report.stats import GraphStats


class Guest(Protocol):
    """A callback or hook of the user's that asked for LMS, and follows the planning, as IBM's classes do."""

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
