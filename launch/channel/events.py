"""What ranks of another launcher have told the supervisor of their job."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Joined:
    """A rank whose program is about to run."""

    rank: int


@dataclass(frozen=True)
class Ending:
    """A rank that its launcher is ending."""

    rank: int


@dataclass(frozen=True)
class Ended:
    """A rank whose program has ended; what stood for it waits for leave to go."""

    rank: int
    status: int
    why: str
    """What more its keeper knows, as the end of a sentence."""


@dataclass(frozen=True)
class Lost:
    """A rank of which nothing more will be heard, although its end was not told."""

    rank: int


@dataclass(frozen=True)
class Carried:
    """A stream of a rank's program, which comes to us and not by way of the launcher."""

    rank: int
    name: str
    """``stdout`` or ``stderr``."""
    fd: int
    """Is where it is read; whoever gets this closes it."""


Event = Joined | Ending | Ended | Lost | Carried
