"""The pass that decides what a step swaps and repeats."""

from collections.abc import Callable
from dataclasses import replace

from lms.config import LMSConfig
from lms.device.link_speed import costs_of_device
from lms.device.memory_pool import PoolClaim
from lms.intercept.side_effects import may_reach_peers
from lms.ir.assignments import in_place
from lms.passes.work import Work
from lms.planner.host_operands import Decision
from lms.planner.hybrid import Score, decide, score
from lms.planner.room import BY_BATCHES
from lms.planner.segments import fits_whole, plan_segments
from lms.profiling.store import Profiles
from lms.rewriter.segments import compilable_ops
from lms.simulate.allocation_trace import batch_bytes
from lms.simulate.cost_model import Costs
from lms.simulate.host_pool import fits_in_pool
from lms.transports.base import Transport

POOL_SHARES = (0.85, 0.7, 0.55)
"""Shares of the host's room that a step is planned for, one after the other, until its regions hold it."""
BATCHES = 2
"""Batches on their way to the device, which lie in the pool of pinned memory, too."""


class Planning:
    """Decides what is swapped and repeated, and whether XLA compiles segments between the swaps."""

    name = "plan"

    def __init__(
        self,
        bandwidth_gb_s: float | None,
        claim: PoolClaim,
        transport: Callable[[], Transport],
        profiles: Callable[[], Profiles],
        load_fillers: Callable[[], bool],
        load_assignment: Callable[[], bool],
    ) -> None:
        self._bandwidth_gb_s, self._claim = bandwidth_gb_s, claim
        self._transport, self._profiles = transport, profiles
        self._load_fillers, self._load_assignment = load_fillers, load_assignment

    def requires(self, work: Work) -> bool:
        """Tell whether there is a step."""
        return work.graph is not None

    def apply(self, work: Work) -> Work:
        """Add the plan."""
        assert work.graph is not None  # noqa: S101 - required
        costs = costs_of_device(work.device, self._bandwidth_gb_s)
        if self._claim.leaves_growing(work.device.type):
            costs = replace(costs, resident_bytes=work.residents.nbytes)
        if _has_limited_host(work.task.config, work.device.type):
            if (room := self._transport().room_bytes()) is not None:
                costs = replace(costs, host_room_bytes=max(0, room - work.stored_bytes))
        costs = replace(costs, profile_s=self._profiles().find(work.graph))
        # Other ranks decide when buffers are made and freed, and fillers fit one order of that: of 40 runs of
        # two Horovod ranks on a busy machine 15 ran out of memory with fillers, and of 30 without them none.
        if work.table is not None and may_reach_peers(work.table.types):
            costs = replace(costs, fills=False)
        planned = self._planned(work, costs)
        if _assigns_in_place(planned.decision) and not self._load_assignment():
            work = replace(work, graph=work.graph.with_moving_variables())
            planned = self._planned(work, costs)
        if planned.decision is not None and planned.decision.plan.fillers and not self._load_fillers():
            return self._planned(work, replace(costs, fills=False))
        return planned

    def _planned(self, work: Work, costs: Costs) -> Work:
        """Plan for less of the host's room until what is swapped fits in its regions, too."""
        planned, room = self._decided(work, costs), costs.host_room_bytes or 0
        for share in POOL_SHARES:
            if not room or self._is_held(planned):
                break
            planned = self._decided(work, replace(costs, host_room_bytes=int(share * room)))
        return planned

    def _is_held(self, work: Work) -> bool:
        transport, decided = self._transport(), work.decision
        if not transport.in_regions or decided is None or decided.plan.is_empty:
            return True
        batches = [batch_bytes(decided.case.buffers)] * BATCHES
        others = (*batches, work.streamed.nbytes, work.streamed.bytes_out)
        return fits_in_pool(decided.plan, transport.room_bytes() or 0, others)

    def _decided(self, work: Work, costs: Costs) -> Work:
        assert work.graph is not None  # noqa: S101 - required
        config, kind = work.task.config, work.device.type
        # Where sizes are open, nothing tells that the step fits.
        is_open = work.step is not None and bool(work.step.unknown or work.step.list_loops)
        may_be_whole = work.task.may_be_whole and not is_open
        if not work.task.compiled or work.step is None or config.xla == "whole":
            made = decide(work.graph, config, kind, work.limit_bytes, costs)
            is_whole = may_be_whole and fits_whole(made, config, work.limit_bytes)
            return replace(work, decision=made, whole=work.whole or is_whole)
        # What a segment reads is freed late. Room for batches would take the share of the margin that
        # plans with segments must leave free.
        held = replace(costs, frees_at_once=False, makes_batches=False)
        # Ops are repeated where swaps alone do not fit, or, but for the least memory, are waited for.
        plain = replace(config, recompute="off") if config.recompute == "auto" else config
        made = decide(work.graph, plain, kind, work.limit_bytes, held)
        if work.whole or (may_be_whole and fits_whole(made, plain, work.limit_bytes)):
            return replace(work, decision=made, whole=True)
        hurries = config.policy != "all" and bool(made.plan.swaps)
        others: list[Decision] = []
        if config is not plain and (hurries or not made.plan.feasible):
            other = decide(work.graph, config, kind, work.limit_bytes, costs)
            others.append(other)
            made = made if other.recomputation is None else other
        if made.plan.feasible or config is plain:
            may = compilable_ops(work.step, kind)
            # What XLA allocates inside of a segment comes in an order of its own.
            unfilled = replace(held, fills=False)
            made = plan_segments(work.graph, may, plain, kind, work.limit_bytes, unfilled, made)

        def rank(one: Decision) -> Score:  # a plan with segments is made without regard to batches
            return score(replace(one, doubt="") if one.doubt == BY_BATCHES else one, work.limit_bytes)

        return replace(work, decision=min([made, *others], key=rank))


def _assigns_in_place(decided: Decision | None) -> bool:
    """Tell whether a plan has assignments write into their variables' memory."""
    return (
        decided is not None
        and not decided.plan.is_empty
        and bool(in_place(decided.case.buffers, decided.plan.order))
    )


def _has_limited_host(config: LMSConfig, device_type: str) -> bool:
    """Tell whether the host may hold less than a plan swaps; else no transport is made to ask it."""
    limited = device_type == "GPU" or config.host_mem_limit_mb is not None or config.store_dir is not None
    return limited and config.policy in ("all", "auto", "budget") and config.recompute != "only"
