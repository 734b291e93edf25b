"""The pass that finds steps which need no plan."""

from dataclasses import replace

from lms.passes.work import Work
from lms.reader.survey import most_bytes
from lms.swaps.swap_planner import LEAVES_WHAT_FITS, usable_bytes
from lms.variables.on_host import HostVariables


class Bounding:
    """Finds steps that need no plan: without reading them, which is most of the work of an edit.

    A step fits for certain where all tensors that it ever makes have room side by side.
    """

    name = "bound"

    def __init__(self, host: HostVariables) -> None:
        self._host = host

    def requires(self, work: Work) -> bool:
        """Tell whether the policy leaves alone what fits."""
        task = work.task
        leaves = task.config.policy in LEAVES_WHAT_FITS and (task.may_be_whole or not task.compiled)
        is_as_it_was = task.specialised.sums is None  # else what runs without an edit is another graph
        return bool(work.outputs) and leaves and is_as_it_was and not self._host.is_on

    def apply(self, work: Work) -> Work:
        """Say whether the step fits, or the device has no known limit."""
        assert work.table is not None  # noqa: S101 - Parsing went before
        room = usable_bytes(work.task.config, work.limit_bytes)
        most = None if room is None else most_bytes(work.table, work.outputs, work.place)
        fits = room is None or (most is not None and most <= room)
        return replace(work, fits=fits, most_bytes=most if fits else None, whole=fits and work.task.compiled)
