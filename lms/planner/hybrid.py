"""Decide for each tensor whether it is kept, swapped, recomputed, or recomputed from a swapped one.

Swaps that hide behind compute cost nothing, so a step is first planned with swaps alone. Where compute would
wait for the link, or where swaps do not free enough, tensors are recomputed in place of being kept or moved
(:mod:`lms.planner.recomputation`). Which ones is searched in three ways:

1. Of the tensors that are swapped those whose ops take less time than their copies, the least time a byte
   first, until no copy is waited for; then the swaps are planned again. (Peng et al., "Capuchin:
   Tensor-based GPU Memory Management for Deep Learning", ASPLOS 2020)
2. Of all tensors those that cost the least time a byte: shares of their bytes.
3. All tensors but those that cross the narrowest places of the forward pass, which are cut into segments of
   about as many bytes each. (Chen et al., 2016)

Each choice is planned and simulated like any step, and the best plan wins. That of swaps alone takes part, so
no plan is worse than that.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from lms.config import LMSConfig
from lms.ir.graph import Graph
from lms.ir.swap_plan import Recomputed, SwapPlan
from lms.planner.host_operands import Decision, plan_swaps
from lms.planner.planner import Case, plan_case, usable_bytes
from lms.planner.policy_budget import NO_STALL
from lms.planner.recomputation import Recomputation, Repeats, recompute
from lms.simulate.cost_model import Costs, costs_of
from lms.simulate.step_time import clock

ROUNDS = 6
"""The most rounds of the first search."""
SHARES = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0)
"""The shares of the bytes that the second search drops."""
SEGMENTS = (2, 4, 8, 16, 32)
"""The numbers of segments that the third search tries."""
SPARED = 5
"""How often the best choice is planned again with less of it."""
BUDGETS = (1.0, 0.8)
"""The shares of the budget that choices are looked for until one fits in pieces, too."""
FINALISTS = 2
"""The choices that are planned in full, with the fragmentation of free memory."""
MOST_OPS = 60_000
"""The ops that all trials together may plan: see :data:`lms.planner.fragmentation.MOST_OPS`."""

Score = tuple[float, ...]
"""The less the better: what is missing, or what is needed, and the time."""


@dataclass(frozen=True)
class Choice:
    """Which buffers are dropped, and which are kept for them."""

    dropped: frozenset[int] = frozenset()
    retained: frozenset[int] = frozenset()


@dataclass(frozen=True)
class _Trial:
    """A choice, its graph and a plan for its swaps, without the fragmentation of free memory."""

    choice: Choice
    recomputation: Recomputation
    plan: SwapPlan
    makespan_s: float
    score: Score


def decide(
    graph: Graph, config: LMSConfig, device_type: str, limit_bytes: int | None, costs: Costs | None = None
) -> Decision:
    """Plan a step: what is kept, swapped and recomputed.

    Args:
        graph: The step.
        config: Policy and parameters.
        device_type: ``CPU`` or ``GPU``.
        limit_bytes: What the device has for the step's own tensors; ``None`` when that is not known.
        costs: The device and its link; the default is a common one of its type.
    """
    costs = costs or costs_of(device_type)
    swapped = plan_swaps(graph, config, device_type, limit_bytes, costs)
    if config.recompute == "off" or config.policy == "threshold":
        return swapped
    if config.policy != "all" and (swapped.plan.is_empty or _is_good(swapped, limit_bytes)):
        return swapped
    found = [swapped]
    before = swapped.case.peak_before_bytes
    for share in BUDGETS:
        search = _Search(swapped, _tighter(config, limit_bytes, share), limit_bytes, costs)
        for trial in search.finalists():
            made = trial.recomputation
            found.append(plan_recomputed(made, config, device_type, limit_bytes, costs, before))
        best = min(found, key=lambda one: _score(one, limit_bytes))
        if config.policy == "all" or not any(_score(best, limit_bytes)[:-1]):
            break
    return best


def _tighter(config: LMSConfig, limit_bytes: int | None, share: float) -> LMSConfig:
    """Return the configuration for a share of the bytes that a plan may use."""
    usable = usable_bytes(config, limit_bytes)
    if config.policy == "all" or usable is None:
        return config
    nbytes = max(1, int(usable * share))
    return replace(config, policy="budget", budget_bytes=nbytes, margin=0.0, exclude_bytes=0)


def plan_recomputed(
    made: Recomputation,
    config: LMSConfig,
    device_type: str,
    limit_bytes: int | None,
    costs: Costs,
    peak_before_bytes: int,
) -> Decision:
    """Plan the swaps of a step in which ops are repeated.

    Args:
        made: The graph with the repeated ops.
        config: Policy and parameters.
        device_type: ``CPU`` or ``GPU``.
        limit_bytes: What the device has for the step's own tensors; ``None`` when that is not known.
        costs: The device and its link.
        peak_before_bytes: What the unedited step needs.
    """
    decided = plan_swaps(made.graph, config, device_type, limit_bytes, costs, peak_before_bytes)
    seconds, graph = costs.op_seconds(made.graph), made.graph
    dropped = [made.tensors.index(root) for root in made.dropped]
    recomputed = Recomputed(
        len(made.repeated),
        len(dropped),
        sum(graph.tensors[root].nbytes or 0 for root in dropped),
        sum(seconds[op] for op in made.repeated),
    )
    return replace(decided, plan=replace(decided.plan, recomputed=recomputed), recomputation=made)


def _is_good(decided: Decision, limit_bytes: int | None) -> bool:
    """Tell whether a step fits and hardly waits for copies."""
    *missing, makespan_s = _score(decided, limit_bytes)
    return not any(missing) and makespan_s <= NO_STALL * sum(decided.case.seconds)


def _score(decided: Decision, limit_bytes: int | None) -> Score:
    made = decided.plan
    needed = decided.peak_bytes - limit_bytes if limit_bytes is not None else 0
    return (*_memory_score(made), max(0, needed), _makespan_s(decided.case, made))


def _memory_score(made: SwapPlan) -> Score:
    if made.policy == "all" and made.budget_bytes is None:
        return (made.peak_bytes,)
    return (max(0, made.peak_bytes - (made.budget_bytes or 0)),)


def _makespan_s(case: Case, made: SwapPlan) -> float:
    return clock(made.order, made.swaps, case.costs, case.seconds).now_s


class _Search:
    """Looks for tensors to recompute.

    Args:
        swapped: The step planned with swaps alone.
        config: Policy and parameters.
        limit_bytes: What the device has for the step's own tensors.
        costs: The device and its link.
    """

    def __init__(self, swapped: Decision, config: LMSConfig, limit_bytes: int | None, costs: Costs) -> None:
        # With operands on the host the graph of the swaps is another one: begin with the step as it was read.
        self._swapped, self._config, self._limit, self._costs = swapped, config, limit_bytes, costs
        relocation = swapped.relocation
        case = swapped.case if relocation is None else Case.of(relocation.before, config, costs)
        self._case = case
        self._repeats = Repeats(case.buffers, config.min_tensor_bytes)
        self._trials: dict[Choice, _Trial] = {}
        self._left = max(8, MOST_OPS // max(1, len(case.graph.ops)))

    def finalists(self) -> list[_Trial]:
        """Return the best trials, the best first; none where nothing can be recomputed."""
        if not self._repeats.candidates:
            return []
        self._replace_swaps(self._rate(Choice()))
        for choice in (*self._shares(), *self._segments()):
            self._rate(choice)
        if self._config.policy != "all":
            best = min(self._trials.values(), key=_by_score)
            self._spare(best)
            self._replace_swaps(min(self._trials.values(), key=_by_score))
        tried = (trial for trial in self._trials.values() if trial.choice.dropped)
        return sorted(tried, key=_by_score)[:FINALISTS]

    def _rate(self, choice: Choice) -> _Trial | None:
        """Plan and simulate a choice; ``None`` once no more may be planned."""
        if choice in self._trials:
            return self._trials[choice]
        if not self._left:
            return None
        self._left -= 1
        made = recompute(self._repeats, choice.dropped, choice.retained)
        case = Case.of(made.graph, self._config, self._costs)
        case = replace(case, peak_before_bytes=self._case.peak_before_bytes)
        plan = plan_case(case, self._config, self._limit)
        makespan_s = _makespan_s(case, plan)
        trial = _Trial(choice, made, plan, makespan_s, (*_memory_score(plan), makespan_s))
        self._trials[choice] = trial
        return trial

    # --- in place of swaps -------------------------------------------------------------------------------

    def _replace_swaps(self, best: _Trial | None) -> None:
        """Recompute what is swapped where that takes less time than compute waits for it.

        A round that makes it slower is tried again with half of its tensors.
        """
        most = len(self._repeats.candidates)
        for _ in range(ROUNDS):
            chosen = self._instead_of_swaps(best)[:most] if best is not None else ()
            if best is None or not chosen:
                break
            trial = self._rate(replace(best.choice, dropped=best.choice.dropped.union(chosen)))
            if trial is not None and trial.score < best.score:
                best = trial
            else:
                most = len(chosen) // 2

    def _instead_of_swaps(self, trial: _Trial) -> Sequence[int]:
        """Choose swapped buffers to recompute, as many as compute waits for.

        First come those that take the least time a byte in place of their copies. What a chosen one repeats
        costs the next ones nothing.
        """
        compute_s = sum(self._costs.op_seconds(trial.recomputation.graph))
        stall_s = trial.makespan_s - compute_s
        if stall_s <= (NO_STALL - 1) * compute_s:
            return ()
        moved = {trial.recomputation.tensors[swap.tensor] for swap in trial.plan.swaps}
        dropped, retained, seconds = trial.choice.dropped, trial.choice.retained, self._case.seconds
        chain = self._repeats.chain
        repeated = set(chain(dropped, dropped, retained))
        gone = set(dropped)
        chosen: list[int] = []
        saved_s = 0.0
        for root in self._ranked:
            if root not in moved or root in dropped:
                continue
            gone.add(root)
            new = chain((root,), gone, retained, repeated)
            own_s = sum(seconds[op] for op in new)
            nbytes = self._case.buffers.nbytes[root]
            link_s = max(self._costs.out_seconds(nbytes), self._costs.in_seconds(nbytes))
            if own_s < link_s:
                chosen.append(root)
                repeated |= new
                saved_s += link_s - own_s
                if saved_s >= stall_s:
                    break
            else:
                gone.remove(root)
        return chosen

    # --- what costs the least ----------------------------------------------------------------------------

    def _shares(self) -> Iterator[Choice]:
        """Yield the buffers that cost the least time a byte, up to shares of all bytes."""
        nbytes = self._case.buffers.nbytes
        sums = list(accumulate(nbytes[root] for root in self._ranked))
        for share in SHARES:
            count = sum(done <= share * sums[-1] for done in sums)
            yield Choice(frozenset(self._ranked[:count]))

    @cached_property
    def _own_s(self) -> dict[int, float]:
        """The seconds that dropping a buffer alone costs."""
        seconds, chain = self._case.seconds, self._repeats.chain
        return {root: sum(seconds[op] for op in chain((root,), (root,))) for root in self._repeats.candidates}

    @cached_property
    def _ranked(self) -> tuple[int, ...]:
        """The candidates, those that cost the least time a byte first."""
        nbytes = self._case.buffers.nbytes
        return tuple(sorted(self._own_s, key=lambda root: (self._own_s[root] / nbytes[root], root)))

    # --- segments ----------------------------------------------------------------------------------------

    def _segments(self) -> Iterator[Choice]:
        """Yield all candidates but those that cross the cuts of the forward pass into segments."""
        candidates, saved = self._repeats.candidates, self._repeats.saved
        for count in SEGMENTS:
            kept = self._crossing(self._cuts(count))
            yield Choice(frozenset(candidates) - kept, kept - saved)

    @cached_property
    def _spans(self) -> tuple[tuple[int, int, int], ...]:
        """Each buffer of the forward pass with its maker and its last reader there."""
        buffers, late = self._case.buffers, self._repeats.late
        tensors = buffers.graph.tensors
        return tuple(
            (root, tensors[root].op, max(op for op in (tensors[root].op, *early)))
            for root in buffers.owners
            if tensors[root].op not in late
            for early in [[op for op in buffers.users[root] if op not in late]]
        )

    def _cuts(self, count: int) -> Sequence[int]:
        """Return ops behind which to cut: each the narrowest place about a segment behind the one before."""
        buffers, ops = self._case.buffers, len(self._case.graph.ops)
        change, made = [0] * (ops + 1), [0] * ops
        for root, first, last in self._spans:
            change[first] += buffers.nbytes[root]
            change[last] -= buffers.nbytes[root]
        for root in self._repeats.candidates:
            made[buffers.graph.tensors[root].op] += buffers.nbytes[root]
        widths = list(accumulate(change[:ops]))
        segment = sum(made) / count
        cuts: list[int] = []
        window: list[int] = []
        gathered = 0
        for op in range(ops):
            if op in self._repeats.late:
                continue
            gathered += made[op]
            if gathered >= segment / 2:
                window.append(op)
            if gathered >= segment:
                cuts.append(min(window, key=lambda one: (widths[one], -one)))
                gathered = sum(made[cuts[-1] + 1 : op + 1])
                window = []
        return cuts

    def _crossing(self, cuts: Sequence[int]) -> frozenset[int]:
        return frozenset(
            root for root, first, last in self._spans if any(first <= cut < last for cut in cuts)
        )

    # --- not more than needed ----------------------------------------------------------------------------

    def _spare(self, best: _Trial) -> None:
        """Try the best choice with fewer tensors: the dearest are kept or swapped after all."""
        dearest = [root for root in reversed(self._ranked) if root in best.choice.dropped]
        low, high = 0, len(dearest)
        for _ in range(SPARED):
            middle = (low + high) // 2
            if middle == low:
                break
            trial = self._rate(replace(best.choice, dropped=best.choice.dropped - {*dearest[:middle]}))
            if trial is None:
                break
            if trial.score <= best.score:
                low = middle
            else:
                high = middle


def _by_score(trial: _Trial) -> tuple[Score, int]:
    return trial.score, len(trial.choice.dropped)
