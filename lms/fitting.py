"""Plans until the buffers of the planned step find room in the device's memory one beside the other."""

from dataclasses import replace

from lms.arena import peak_in_pieces
from lms.config import LMSConfig
from lms.costs import Costs
from lms.graph import Graph
from lms.liveness import Buffers, timeline
from lms.planner import Case, plan_case
from lms.swap_plan import SwapPlan

TRIES = 12
TIGHTER = 0.93
"""Each further try plans for this fraction of the bytes of the one before."""


def plan_in_pieces(graph: Graph, config: LMSConfig, limit_bytes: int | None, costs: Costs) -> SwapPlan:
    """A plan whose bytes fit, and whose buffers fit between each other too.

    Memory in pieces can need half as much again as its bytes say. A plan that would fail for that reason is
    made again with fewer bytes, down to the least that is possible.

    Args:
        graph: The step.
        config: Policy and parameters.
        limit_bytes: What the device has for the step's own tensors; ``None`` when that is not known.
        costs: The device and its link.
    """
    case = Case.of(graph, config, costs)
    made = first = plan_case(case, config, limit_bytes)
    if limit_bytes is None or made.policy not in ("auto", "budget"):
        return made
    buffers = case.buffers
    allowed = limit_bytes if config.budget_bytes is None else config.budget_bytes
    room = int(limit_bytes * (1 - config.margin))  # scratch and updated variables lie between
    for _ in range(TRIES):
        if _peak(buffers, made, room) is not None:
            return _told(made, first)
        if not made.feasible:
            break
        allowed = int(min(allowed, made.peak_bytes / (1 - config.margin)) * TIGHTER)
        tighter = replace(config, policy="budget", budget_bytes=allowed + config.exclude_bytes)
        made = plan_case(case, tighter, None)
    least = plan_case(case, replace(config, policy="all"), limit_bytes)
    if _peak(buffers, least, room) is not None:
        return _told(least, first)
    return min(first, made, least, key=lambda one: one.peak_bytes)


def _told(made: SwapPlan, first: SwapPlan) -> SwapPlan:
    if made is first:
        return made
    wanted, planned = first.peak_bytes / 2**20, made.peak_bytes / 2**20
    note = f"planned {planned:.1f} MiB instead of {wanted:.1f} MiB, because free memory lies in pieces"
    return replace(made, budget_bytes=first.budget_bytes, notes=(*made.notes, note))


def predicted_peak(graph: Graph, made: SwapPlan, limit_bytes: int | None) -> int:
    """The peak that the device's allocator will report for the planned step alone.

    It is above the plan's own bytes, because the allocator counts what its chunks have to spare. Without a
    limit, or where the buffers find no room, it is the plan's bytes.
    """
    peak = None if limit_bytes is None else _peak(Buffers.of(graph), made, limit_bytes)
    return made.peak_bytes if peak is None else max(peak, made.peak_bytes)


def _peak(buffers: Buffers, made: SwapPlan, limit_bytes: int) -> int | None:
    return peak_in_pieces(timeline(buffers, made.order, made.swaps).residencies, limit_bytes)
