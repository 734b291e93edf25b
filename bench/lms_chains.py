"""Measure what runs of blocks gain in the timed simulator: networks of layers in a row x links x memory.

``python bench/lms_chains.py`` needs no device and no TensorFlow. It plans each step three times: with swaps
alone, with recomputing but without the dynamic programme over blocks, and with it. Slowdowns are against the
step with nothing swapped; op times are a roofline of a V100.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from time import process_time

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # before this folder, which has a lms.py

from lms_models import encoder, plain_chain, resnet
from lms_sim import DEVICES, LINKS_GB_PER_S

from lms.config import LMSConfig
from lms.ir.graph import Graph
from lms.planner import hybrid
from lms.simulate.cost_model import Costs
from lms.simulate.step_time import clock
from lms.swaps.case import Case

MODELS: dict[str, Callable[[], Graph]] = {
    "32 convolutions": lambda: plain_chain(32, 64),
    "100 convolutions": lambda: plain_chain(100, 32),
    "encoder, 12 layers": lambda: encoder(12, 16),
    "ResNet-50": lambda: resnet((3, 4, 6, 3), 64),
    "ResNet-101": lambda: resnet((3, 4, 23, 3), 32),
}
LINKS = ("PCIe 3 (12)", "PCIe 4 (24)", "PCIe 5 (55)")
SHARES = (2, 4, 8)
BETTER = 1e-4
"""A plan wins that takes so much less, as a share of the step."""


@dataclass(frozen=True)
class Row:
    """A network on a link with a share of its memory: slowdowns, ``None`` where no plan fits."""

    model: str
    link: str
    share: int
    swaps: float | None
    without: float | None
    runs: float | None
    """With the dynamic programme."""
    without_s: float
    runs_s: float
    """Processor time of planning."""

    def __str__(self) -> str:
        cells = "".join(
            f"{'-':>9}" if one is None else f"{one:9.3f}" for one in (self.swaps, self.without, self.runs)
        )
        return (
            f"{self.model:20}{self.link:14}1/{self.share:<4}{cells}{self.without_s:10.2f}{self.runs_s:8.2f}"
        )

    @property
    def gain(self) -> float:
        """Return how much less the step takes with the dynamic programme, as a share of the step."""
        return 0.0 if self.without is None or self.runs is None else self.without - self.runs


def rows(models: dict[str, Callable[[], Graph]]) -> Iterator[Row]:
    """Plan every case."""
    for model, make in models.items():
        graph = make()
        for link in LINKS:
            speed = LINKS_GB_PER_S[link] * 1e9
            costs = replace(DEVICES["V100"], out_bytes_per_s=speed, in_bytes_per_s=speed)
            case = Case.of(graph, LMSConfig(), costs)
            peak = min(schedule.timeline.peak_bytes for schedule in case.schedules)
            for share in SHARES:
                config = LMSConfig(policy="budget", budget_bytes=peak // share, margin=0.0)
                swaps, _ = _planned(case, replace(config, recompute="off"), costs)
                auto = replace(config, recompute="auto")
                wanted, hybrid.OF_BLOCKS = hybrid.OF_BLOCKS, 0
                without, without_s = _planned(case, auto, costs)
                hybrid.OF_BLOCKS = wanted
                runs, runs_s = _planned(case, auto, costs)
                yield Row(model, link, share, swaps, without, runs, without_s, runs_s)


def _planned(case: Case, config: LMSConfig, costs: Costs) -> tuple[float | None, float]:
    began = process_time()
    decided = hybrid.decide(case.graph, config, "GPU", None, costs)
    took_s = process_time() - began
    if not decided.plan.feasible:
        return None, took_s
    run = clock(decided.plan.order, decided.plan.swaps, costs, decided.case.seconds)
    return run.now_s / sum(case.seconds), took_s


def main() -> int:
    """Print the table; exit 1 where the programme makes a plan slower."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="a short chain alone")
    models = {"16 convolutions": lambda: plain_chain(16, 32)} if parser.parse_args().quick else MODELS
    head = "".join(f"{name:>9}" for name in ("swaps", "without", "runs"))
    print(f"{'model':20}{'link GB/s':14}{'memory':6}{head}{'s without':>10}{'s runs':>8}")
    table = []
    for row in rows(models):
        table.append(row)
        print(row, flush=True)
    better = sum(row.gain > BETTER for row in table)
    worse = sum(row.gain < -BETTER for row in table)
    print(f"of {len(table)} cases the programme over blocks makes {better} faster and {worse} slower")
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
