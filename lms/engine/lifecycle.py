"""In which state the engine of a process is."""

from enum import Enum


class Lifecycle(Enum):
    """What the engine does with the graphs that TensorFlow hands it."""

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
