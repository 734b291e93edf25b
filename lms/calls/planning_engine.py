"""The engine as the calls of steps see it."""

from typing import Protocol

from lms.config import LMSConfig
from lms.device.device import Device
from lms.intercept.optimizer_options import OptimizerOptions
from lms.process.books import Books
from lms.process.resources import Resources
from lms.report.stats import Report


class PlanningEngine(Protocol):
    """Plans the steps that calls run."""

    config: LMSConfig
    books: Books
    options: OptimizerOptions
    resources: Resources

    @property
    def fullest_device(self) -> Device:
        """The device with the largest planned peak, whose memory is told."""

    def refusal(self) -> str | None:
        """Return why no step may be planned now; ``None`` where steps may."""

    def refuse_unseen(self, text: str) -> None:
        """Tell whoever wants a forecast, if anybody does, why a training step cannot be seen."""

    def report(self, *, settled: bool = True) -> Report:
        """Report what was done so far."""
