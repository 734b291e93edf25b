"""The states of a process's engine, and the guests that may have it for a while."""

from collections.abc import Sequence
from enum import Enum
from typing import Protocol

from lms.ir.name_filters import Unmatched
from lms.report.stats import GraphStats


class Lifecycle(Enum):
    """A state of the engine: whether it edits the graphs that TensorFlow hands it, and for whom."""

    ON = "on"
    """A job or a script has switched LMS on."""
    BORROWED = "borrowed"
    """On for the training of a callback alone."""
    PAUSED = "paused"
    """It edits nothing, and knows what it did."""
    OFF = "off"
    """It is gone for good."""

    @property
    def edits(self) -> bool:
        """Whether steps are planned."""
        return self in (Lifecycle.ON, Lifecycle.BORROWED)


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
