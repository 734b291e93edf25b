"""Policy ``all``: the least memory that swapping can reach, whatever it costs."""

from lms.schedule.schedule import Schedule, Trip

SHORTEST = (2, 4)
"""Least numbers of steps between two uses that are worth a trip: the shorter ones often gain nothing."""


def plan_all(schedule: Schedule, shortest: int = 2) -> tuple[Trip, ...]:
    """Send every buffer away between any two uses ``shortest`` steps apart, and fetch it just in time."""
    return tuple(
        Trip(root, left, back, trigger=back - 1, freed=left + 1)
        for root, steps in schedule.uses.items()
        for left, back in zip(steps, steps[1:], strict=False)
        if back - left >= shortest
    )
