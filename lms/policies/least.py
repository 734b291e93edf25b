"""Policy ``all``: the least memory that swapping can reach, whatever it costs."""

from lms.schedule import Schedule, Trip


def plan_all(schedule: Schedule) -> tuple[Trip, ...]:
    """Send every buffer away between any two uses that are not neighbours, and fetch it just in time."""
    return tuple(
        Trip(root, left, back, trigger=back - 1, freed=left + 1)
        for root, steps in schedule.uses.items()
        for left, back in zip(steps, steps[1:], strict=False)
        if back - left > 1
    )
