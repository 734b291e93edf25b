"""What swapping costs in the timed simulator: models x links x memory, for every policy and a lower bound.

No device and no TensorFlow is needed: ``python bench/lms_sim.py`` prints one table, ``--out FILE`` adds the
numbers to the benchmarks' document. Nothing here was measured on hardware: op times are a roofline of the
device named in the output.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import perf_counter

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # before this folder, which has a lms.py

from lms_document import Document, write_part
from lms_models import resnet, unet3d

from lms.config import LMSConfig
from lms.ir.graph import Graph
from lms.planner.hybrid import decide
from lms.schedule.op_order import topological_levels
from lms.simulate.cost_model import Costs
from lms.simulate.step_time import Timing, clock, simulate
from lms.swaps.case import Case
from lms.swaps.swap_planner import plan
from lms.swaps.threshold import GridPoint, Rule, grid

MODELS: dict[str, Callable[[], Graph]] = {
    "ResNet-50, batch 64": lambda: resnet((3, 4, 6, 3), 64),
    "ResNet-152, batch 32": lambda: resnet((3, 8, 36, 3), 32),
    "3D U-Net, 128^3": lambda: unet3d(1, 128),
}
LINKS_GB_PER_S = {
    "PCIe 3 (12)": 12,
    "PCIe 4 (24)": 24,
    "PCIe 5 (55)": 55,
    "NVLink2 (60)": 60,
    "C2C (350)": 350,
}
SHARES = (1.25, 1.5, 2.0, 4.0)
DEVICES = {
    "V100": Costs(flops_per_s=9e12, device_bytes_per_s=6e11),
    "H100": Costs(flops_per_s=2e14, device_bytes_per_s=2.4e12),
}


@dataclass(frozen=True)
class Row:
    """One model on one link with one share of the memory; slowdowns are relative to no swapping."""

    model: str
    link: str
    memory: str
    budget_bytes: int
    bound: float
    budget: float | None
    hybrid: float | None
    """Policy ``budget`` with ``recompute="auto"``."""
    threshold: float | None
    all: float
    budget_moved_bytes: int
    all_moved_bytes: int
    plan_s: float
    note: str

    @property
    def over_bound(self) -> float | None:
        """How far the policy ``budget`` is from the lower bound."""
        return None if self.budget is None else self.budget / self.bound


def lower_bound(case: Case, budget_bytes: int, costs: Costs) -> float:
    """``max(T before the peak, S / out) + max(T after it, S / in)`` over the compute time.

    ``S`` is what has to leave by the peak of the step; no plan that swaps can be faster.
    """
    schedule = min((case.frugal, case.given), key=lambda schedule: schedule.timeline.peak_bytes)
    seconds = costs.op_seconds(case.graph)
    excess = schedule.timeline.peak_bytes - budget_bytes
    at = schedule.timeline.peak_position or 0
    before = sum(seconds[op] for op in schedule.order[:at])
    total = sum(seconds)
    if excess <= 0:
        return 1.0
    slow = max(before, excess / costs.out_bytes_per_s) + max(total - before, excess / costs.in_bytes_per_s)
    return slow / total


def grid_points(case: Case, costs: Costs) -> list[GridPoint]:
    """List the whole threshold grid: distances, grouping, lead, with and without waiting for copies out."""
    levels = topological_levels(case.graph)
    return [
        point
        for wait_out in (False, True)
        for point in grid(
            case.frugal,
            levels,
            costs,
            Rule(wait_out=wait_out),
            count=10,
            aheads=(1, 3, 10, 30, 100),
            groupbys=(0, 10),
        )
    ]


def rows(models: Sequence[str], links: Sequence[str], device: Costs) -> list[Row]:
    """Compute the whole table."""
    table = []
    for model in models:
        graph = MODELS[model]()
        for link in links:
            speed = LINKS_GB_PER_S[link] * 1e9
            costs = replace(device, out_bytes_per_s=speed, in_bytes_per_s=speed)
            case = Case.of(graph, LMSConfig(), costs)
            points = grid_points(case, costs)
            least = plan(graph, LMSConfig(policy="all"), costs=costs)
            all_timing = simulate(case.buffers, least.order, least.swaps, costs)
            moved = least.bytes_moved
            for share in SHARES:
                table.append(_row(case, costs, (model, link, share), points, all_timing, moved))
    return table


def _row(
    case: Case,
    costs: Costs,
    where: tuple[str, str, float],
    points: Sequence[GridPoint],
    all_timing: Timing,
    all_moved: int,
) -> Row:
    model, link, share = where
    peak = min(case.given.timeline.peak_bytes, case.frugal.timeline.peak_bytes)
    budget = int(peak / share)
    began = perf_counter()
    config = LMSConfig(policy="budget", budget_bytes=budget, margin=0.0)
    made = plan(case.graph, config, costs=costs)
    took = perf_counter() - began
    decided = decide(case.graph, replace(config, recompute="auto"), "GPU", None, costs)
    hybrid_s = clock(decided.plan.order, decided.plan.swaps, costs, decided.case.seconds).now_s
    timing = simulate(case.buffers, made.order, made.swaps, costs)
    within = [point.timing.slowdown for point in points if point.timing.peak_bytes <= budget]
    return Row(
        model,
        link,
        f"1/{share:g}",
        budget,
        lower_bound(case, budget, costs),
        timing.slowdown if made.feasible else None,
        hybrid_s / timing.compute_s if decided.plan.feasible else None,
        min(within, default=None),
        all_timing.slowdown,
        made.bytes_moved,
        all_moved,
        took,
        "; ".join(made.notes),
    )


def render(table: Sequence[Row]) -> str:
    """Render the table as text."""
    head = f"{'model':22}{'link GB/s':14}{'memory':8}"
    head += "".join(f"{name:>8}" for name in ("bound", "budget", "/bound", "hybrid", "grid", "all"))
    lines = [head + f"{'GiB moved':>11}{'all GiB':>9}{'plan ms':>9}"]
    lines += [
        f"{row.model:22}{row.link:14}{row.memory:8}{row.bound:8.2f}{_cell(row.budget)}{_cell(row.over_bound)}"
        f"{_cell(row.hybrid)}{_cell(row.threshold)}{row.all:8.2f}{row.budget_moved_bytes / 2**30:11.2f}"
        f"{row.all_moved_bytes / 2**30:9.2f}{1000 * row.plan_s:9.0f}"
        for row in table
    ]
    return "\n".join(lines)


def _cell(value: float | None) -> str:
    return f"{'-':>8}" if value is None else f"{value:8.2f}"


def misses(table: Sequence[Row]) -> list[str]:
    """Where a goal is missed.

    Never slower than the best grid point, within 1.25 of the bound at 1/1.5, and recomputing costs nothing.
    """
    found = []
    for row in table:
        where = f"{row.model}, {row.link}, {row.memory}"
        if row.budget is not None and row.threshold is not None and row.budget > row.threshold * 1.001:
            found.append(f"{where}: budget {row.budget:.3f} against {row.threshold:.3f} of the grid")
        if row.budget is None and row.threshold is not None:
            found.append(f"{where}: the grid fits and budget does not")
        if row.budget is not None and (row.hybrid is None or row.hybrid > row.budget * 1.001):
            found.append(f"{where}: hybrid {row.hybrid} against {row.budget:.3f} of swaps alone")
        if row.memory == "1/1.5" and (row.over_bound is None or row.over_bound > 1.25):
            found.append(f"{where}: {row.over_bound} times the bound")
    return found


def main() -> int:
    """Make the table; exit 1 when a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, help="file of the JSON document; it is added to")
    parser.add_argument("--device", choices=DEVICES, default="V100", help="whose roofline gives the op times")
    parser.add_argument(
        "--quick", action="store_true", help="ResNet-50 on the slowest and the fastest link only"
    )
    args = parser.parse_args()
    models, links = list(MODELS), list(LINKS_GB_PER_S)
    if args.quick:
        models, links = models[:1], [links[0], links[-1]]
    table = rows(models, links, DEVICES[args.device])
    simulated: Document = {"device": args.device, "rows": [asdict(row) for row in table]}
    print(text(simulated))
    if args.out:
        write_part(args.out, "simulated", simulated)
    return 1 if misses(table) else 0


def text(simulated: Document) -> str:
    """Render the table of this part of the document, and the goals that were missed."""
    table = [Row(**row) for row in simulated["rows"]]
    head = f"simulated, op times from a roofline of {simulated['device']}; slowdown against no swapping, "
    return "\n".join([f"{head}- does not fit", render(table), *(misses(table) or ["all goals met"])])


if __name__ == "__main__":
    sys.exit(main())
