"""The states of a process's engine."""

from enum import Enum


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
