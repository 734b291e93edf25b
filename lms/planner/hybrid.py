"""Decide for each tensor whether it is kept, swapped, recomputed, or recomputed from a swapped one.

Swaps that hide behind compute cost nothing, so a step is first planned with swaps alone. Where compute would
wait for the link, or where swaps do not free enough, tensors are recomputed in place of being kept or moved
(:mod:`lms.planner.recomputation`). Policy ``all`` asks for the least memory, which swaps need: there tensors
are recomputed only where the host or the device has no room for that. Which ones is searched in four ways:

1. Of the tensors that are swapped those whose ops take less time than their copies, the least time a byte
   first, until no copy is waited for; then the swaps are planned again. (Peng et al., "Capuchin:
   Tensor-based GPU Memory Management for Deep Learning", ASPLOS 2020)
2. Of all tensors those that cost the least time a byte: shares of their bytes.
3. All tensors but those that cross the narrowest places of the forward pass: runs of the blocks between
   these, of which a dynamic programme finds what to keep, to move and to repeat (:mod:`lms.planner.blocks`),
   and segments of about as many bytes each (Chen et al., 2016).
4. Beside the best of these: one tensor more or less, or another; ops that are repeated ahead of their need,
   so that they run while compute would wait for a copy; tensors that others are repeated from before they
   are dropped. Steps of many ops get few of these trials.

Each choice is planned and simulated like any step, and the best plan wins. That of swaps alone takes part, so
no plan is worse than that.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, product

from lms.config import LMSConfig
from lms.ir.graph import Graph
from lms.ir.swap_plan import Recomputed, Sent, SwapPlan
from lms.planner.blocks import Blocks
from lms.planner.choices import Choice, Choices
from lms.planner.host_operands import Decision, plan_swaps, read_from_host, refined
from lms.planner.recomputation import Recomputation, recompute
from lms.simulate.cost_model import Costs, costs_of
from lms.swaps.budget import NO_STALL
from lms.swaps.case import Case
from lms.swaps.swap_planner import plan_case, usable_bytes

ROUNDS = 6
"""The most rounds of the first search."""
SPARED = 5
"""How often the best choice is planned again with less of it."""
BUDGETS = (1.0, 0.8)
"""The shares of the budget for which choices are looked for. The second one's turn comes where no plan of the
first fits in pieces, or where it takes longer for that: choices for less memory lie in fewer pieces."""
IN_PIECES = 1.1
"""How many times as long as its choice, whose buffers may lie anywhere, a plan may take for that."""
SHARES = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 1.0)
SEGMENTS = (8, 16, 32)
"""The shares of bytes, and the numbers of segments, of the second and the third search."""
OF_BLOCKS = 2
"""The choices of runs of blocks that are planned."""
NEAR = 1.03
"""The best choices of two kinds are both improved if the second takes at most so many times as long."""
FINALISTS, MOST_FINALISTS = 2, 5
"""The choices that are planned in full, with the fragmentation of free memory, and how many are where these
take much longer for that: which buffers happen to fit differs even between choices much alike."""
REFINED = 2
"""The best of these plans, which are looked at for faster ones."""
HOPELESS = 0.5
"""Where a step may use less than this share of what its largest op needs, no choices are looked for."""
VARIED_OPS = 12_000
"""The ops that the trials of the last search may plan."""
AHEAD = (0, 1, 2, 4)
"""How many ops of the backward pass ahead of its need a chain may be repeated."""
MOST_OPS = 60_000
"""The ops that all trials together may plan: see :data:`lms.planner.fragmentation.MOST_OPS`."""

Score = tuple[float, ...]
"""The less the better: what is missing, or what is needed, and the time."""


@dataclass(frozen=True)
class _Trial:
    """A choice, its graph and a plan for its swaps, without the fragmentation of free memory."""

    choice: Choice
    recomputation: Recomputation
    sources: Sequence[int | None]
    """For each tensor of the planned graph the one of the step; ``None`` of copies on the host."""
    plan: SwapPlan
    compute_s: float
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
    alone = config.recompute == "off" or config.policy == "threshold"
    swapped = plan_swaps(graph, config, device_type, limit_bytes, costs, thorough=alone)
    if alone:
        return swapped
    if config.policy == "all":
        needs_none = config.recompute == "auto" and _fits(swapped, limit_bytes)
    else:
        swapped, needs_none = _refined_swaps(swapped, config, limit_bytes)
    if needs_none or _is_hopeless(swapped, config, limit_bytes):
        return swapped
    best, before, others = swapped, swapped.case.peak_before_bytes, list[_Trial]()
    planned: dict[Choice, Decision] = {}

    def improved(trials: Sequence[_Trial]) -> Decision:
        """Plan choices in full, each once; return the best decision, those of before among them."""
        top, made = best, [swapped] if best is swapped else []
        for trial in trials:
            *missing, makespan_s = score(top, limit_bytes)
            if top is not swapped and not any(missing) and trial.makespan_s >= makespan_s:
                continue  # in pieces a choice takes no less
            if trial.choice not in planned:
                again = trial.recomputation
                planned[trial.choice] = plan_recomputed(
                    again, config, device_type, limit_bytes, costs, before
                )
            made.append(planned[trial.choice])
            top = min(top, made[-1], key=lambda one: score(one, limit_bytes))
        return top if config.policy == "all" else _refined_best(top, made, config, limit_bytes)

    for share in BUDGETS:
        search = _Search(swapped, _tighter(config, limit_bytes, share), device_type, limit_bytes, costs)
        trials = search.finalists()
        best, others = improved(trials[:FINALISTS]), [*others, *trials[FINALISTS:]]
        *missing, makespan_s = score(best, limit_bytes)
        least_s = trials[0].makespan_s if trials else makespan_s
        if config.policy == "all" or not (any(missing) or makespan_s > IN_PIECES * least_s):
            return best
    return improved(others)


def _refined_best(
    best: Decision, made: Sequence[Decision], config: LMSConfig, limit_bytes: int | None
) -> Decision:
    """Look for faster plans of those decisions that may have one; return the best."""

    def rank(one: Decision) -> Score:
        return (*score(one, limit_bytes), one.plan.bytes_moved)

    for place, found in enumerate(sorted(made, key=rank)):
        if place >= REFINED and found.recomputation is not None:
            continue  # swaps alone always take part
        *missing, makespan_s = score(best, limit_bytes)
        if found is best or any(missing) or _unbroken_s(found.case, config, limit_bytes) < makespan_s:
            best = min(best, refined(found, config, limit_bytes), key=rank)
    return best


def _unbroken_s(case: Case, config: LMSConfig, limit_bytes: int | None) -> float:
    """Return the time of a step where no free memory lies in pieces."""
    return case.makespan_s(plan_case(case, config, limit_bytes))


def _refined_swaps(swapped: Decision, config: LMSConfig, limit_bytes: int | None) -> tuple[Decision, bool]:
    """Look for a faster plan of swaps alone where nothing but free memory in pieces makes it slow.

    Returns:
        The plan, and whether it is so good that nothing needs to be recomputed.
    """
    if swapped.plan.is_empty and swapped.plan.feasible:
        return swapped, True
    least_s = _least_s(swapped.case, config)
    if (
        _is_good(swapped, limit_bytes, least_s)
        or _unbroken_s(swapped.case, config, limit_bytes) <= NO_STALL * least_s
    ):
        swapped = _refined_best(swapped, [swapped], config, limit_bytes)
    return swapped, _is_good(swapped, limit_bytes, least_s)


def _is_hopeless(swapped: Decision, config: LMSConfig, limit_bytes: int | None) -> bool:
    """Tell whether one op of a step needs twice what the step may use, which no choice mends."""
    usable = usable_bytes(config, limit_bytes)
    return usable is not None and usable < swapped.plan.floor_bytes * HOPELESS


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
    """Plan the swaps of a step in which ops are repeated, without looking for the fastest plan.

    Args:
        made: The graph with the repeated ops.
        config: Policy and parameters.
        device_type: ``CPU`` or ``GPU``.
        limit_bytes: What the device has for the step's own tensors; ``None`` when that is not known.
        costs: The device and its link.
        peak_before_bytes: What the unedited step needs.
    """
    decided = plan_swaps(
        made.graph, config, device_type, limit_bytes, costs, peak_before_bytes, thorough=False
    )
    seconds, graph = costs.op_seconds(made.graph), made.graph
    first = {old: tensor for tensor, old in reversed([*enumerate(made.tensors)])}
    dropped = [first[root] for root in made.dropped]
    recomputed = Recomputed(
        len(made.repeated),
        len(dropped),
        sum(graph.tensors[root].nbytes or 0 for root in dropped),
        sum(seconds[op] for op in made.repeated),
    )
    return replace(decided, plan=replace(decided.plan, recomputed=recomputed), recomputation=made)


def _fits(decided: Decision, limit_bytes: int | None) -> bool:
    """Tell whether the device and the host have room for a plan."""
    return decided.fits(limit_bytes) and not decided.case.costs.host_lacks(decided.plan.bytes_out)


def _is_good(decided: Decision, limit_bytes: int | None, least_s: float) -> bool:
    """Tell whether a step fits and takes hardly longer than it must."""
    *missing, makespan_s = score(decided, limit_bytes)
    return not any(missing) and makespan_s <= NO_STALL * least_s


def _least_s(case: Case, config: LMSConfig) -> float:
    """Return the time that a step must take: of compute, or that of its streams with memory to spare."""
    if not case.streams:
        return sum(case.seconds)
    unlimited = replace(config, policy="budget", margin=0.0, exclude_bytes=0, budget_bytes=1 << 60)
    return case.makespan_s(plan_case(case, unlimited, None))


def score(decided: Decision, limit_bytes: int | None) -> Score:
    """Return what is missing on the host, in the budget and on the device, and the time of a step.

    A plan that may fail by chance ranks behind those that do not, whatever time they take.
    """
    made = decided.plan
    needed = decided.peak_bytes - limit_bytes if limit_bytes is not None else 0
    missing = (*_memory_score(decided.case, made), max(0, needed), bool(decided.doubt))
    return (*missing, _makespan_s(decided.case, made))


def _memory_score(case: Case, made: SwapPlan) -> Score:
    lacks = case.costs.host_lacks(made.bytes_out)
    if made.policy == "all" and made.budget_bytes is None:
        return (lacks, made.peak_bytes)
    return (lacks, max(0, made.peak_bytes - (made.budget_bytes or 0)))


def _makespan_s(case: Case, made: SwapPlan) -> float:
    return case.makespan_s(made)


class _Search:
    """Looks for tensors to recompute.

    Args:
        swapped: The step planned with swaps alone.
        config: Policy and parameters.
        device_type: ``CPU`` or ``GPU``.
        limit_bytes: What the device has for the step's own tensors.
        costs: The device and its link.
    """

    def __init__(
        self,
        swapped: Decision,
        config: LMSConfig,
        device_type: str,
        limit_bytes: int | None,
        costs: Costs,
    ) -> None:
        self._config, self._limit, self._costs = config, limit_bytes, costs
        # With operands on the host the graph of the swaps is another one: begin with the step as it was read.
        relocation = swapped.relocation
        case = swapped.case if relocation is None else Case.of(relocation.before, config, costs)
        self._case, self._direct = case, device_type != "GPU"
        self._movers = frozenset(
            () if relocation is None else (relocation.ops[read.op] for read in relocation.reads)
        )
        """The ops that read from the host in every trial, as in the plan of the swaps."""
        self._least_s = _least_s(case, config)
        self._choices = Choices(case, config.min_tensor_bytes)
        self._repeats = self._choices.repeats
        self._trials: dict[Choice, _Trial] = {}
        self._left = max(8, MOST_OPS // max(1, len(case.graph.ops)))

    def finalists(self) -> list[_Trial]:
        """Return the best trials, the best first; none where nothing can be recomputed."""
        if not self._repeats.candidates:
            return []
        self._replace_swaps(self._rate(Choice()))
        if self._config.policy == "all":
            self._rated((*self._choices.shares(), *self._choices.segments()))
        else:
            swapped = self._best()
            of_blocks = self._rated(islice(self._of_blocks(), OF_BLOCKS))  # first: large steps get few trials
            others = self._rated((*self._choices.shares(SHARES), *self._choices.segments(SEGMENTS)))
            for start in _near((_best_of(of_blocks), _best_of((swapped, *others)))):
                self._replace_swaps(self._spare(start))
            self._vary(self._best())
        tried = (trial for trial in self._trials.values() if trial.choice.dropped)
        return sorted(tried, key=_by_score)[:MOST_FINALISTS]

    def _best(self) -> _Trial:
        return min(self._trials.values(), key=_by_score)

    def _of_blocks(self) -> Iterator[Choice]:
        """Yield choices of runs of blocks; none without a budget, or where it holds no such runs."""
        budget = usable_bytes(self._config, self._limit)
        if budget is None:
            return iter(())
        return Blocks(self._case, self._choices, budget).choices(moves=self._config.recompute != "only")

    def _rated(self, choices: Iterable[Choice]) -> list[_Trial]:
        return [trial for choice in choices if (trial := self._rate(choice)) is not None]

    def _rate(self, choice: Choice) -> _Trial | None:
        """Plan and simulate a choice; ``None`` once no more may be planned."""
        if choice in self._trials:
            return self._trials[choice]
        if not self._left:
            return None
        self._left -= 1
        made = recompute(self._repeats, choice.dropped, choice.retained, choice.borrowed, choice.ahead)
        graph, sources, sent = self._relocated(made)
        case = Case.of(graph, self._config, self._costs)
        case = replace(case, peak_before_bytes=self._case.peak_before_bytes)
        plan = replace(plan_case(case, self._config, self._limit), sent=sent)
        makespan_s = _makespan_s(case, plan)
        score = (*_memory_score(case, plan), makespan_s)
        trial = _Trial(choice, made, sources, plan, sum(case.seconds), makespan_s, score)
        self._trials[choice] = trial
        return trial

    def _relocated(self, made: Recomputation) -> tuple[Graph, Sequence[int | None], tuple[Sent, ...]]:
        """Return the graph to plan, for each tensor of it the one of the step, and what it sends."""
        if not self._movers:
            return made.graph, made.tensors, ()
        movers = [op for op, source in enumerate(made.ops) if source in self._movers]
        found = read_from_host(made.graph, movers, self._config.min_tensor_bytes, direct=self._direct)
        sources = [None if one is None else made.tensors[one] for one in found.tensors]
        return found.graph, sources, found.sent

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
        stall_s = trial.makespan_s - max(trial.compute_s, self._least_s)
        if stall_s <= (NO_STALL - 1) * trial.compute_s:
            return ()
        moved = {trial.sources[swap.tensor] for swap in trial.plan.swaps}
        dropped, retained, seconds = trial.choice.dropped, trial.choice.retained, self._case.seconds
        chain = self._repeats.chain
        repeated = set(chain(dropped, dropped, retained))
        gone = set(dropped)
        chosen: list[int] = []
        saved_s = 0.0
        for root in self._choices.ranked:
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

    # --- not more than needed ----------------------------------------------------------------------------

    def _spare(self, best: _Trial) -> _Trial:
        """Try a choice with fewer tensors, the dearest kept or swapped after all, and return the best."""
        dearest = [root for root in reversed(self._choices.ranked) if root in best.choice.dropped]
        found = best
        low, high = 0, len(dearest)
        for _ in range(SPARED):
            middle = (low + high) // 2
            if middle == low:
                break
            trial = self._rate(replace(best.choice, dropped=best.choice.dropped - {*dearest[:middle]}))
            if trial is None:
                break
            if trial.score <= best.score:
                low, found = middle, min(found, trial, key=_by_score)
            else:
                high = middle
        return found

    # --- one more or less --------------------------------------------------------------------------------

    def _vary(self, best: _Trial) -> None:
        """Try choices beside the best one, for as long as one of them is better.

        What a later choice made needless is so undone. Steps of many ops get few trials: what one tensor
        changes there is little.
        """
        tries = VARIED_OPS // len(self._case.graph.ops)
        moves = self._moves(best.choice)
        while tries and self._waits(best) and (move := next(moves, None)) is not None:
            tries -= 1
            trial = self._rate(move)
            if trial is not None and trial.score < best.score:
                best, moves = trial, self._moves(trial.choice)

    def _moves(self, choice: Choice) -> Iterator[Choice]:
        """Yield choices beside one: repeated earlier, one tensor more or less, or for another."""
        ranked = self._choices.ranked
        yield from (replace(choice, ahead=ahead) for ahead in AHEAD if ahead != choice.ahead)
        yield from (replace(choice, dropped=choice.dropped ^ {root}) for root in ranked)
        dropped = [root for root in reversed(ranked) if root in choice.dropped]
        yield from (replace(choice, borrowed=choice.borrowed ^ {root}) for root in dropped)
        kept = [root for root in ranked if root not in choice.dropped]
        yield from (replace(choice, dropped=choice.dropped ^ {*pair}) for pair in product(dropped, kept))
        yield from (
            replace(choice, dropped=choice.dropped | {root}, borrowed=choice.borrowed | {root})
            for root in kept
        )

    def _waits(self, trial: _Trial) -> bool:
        """Tell whether a trial does not fit, or takes noticeably longer than the step must."""
        *missing, makespan_s = trial.score
        return any(missing) or makespan_s > NO_STALL * self._least_s


def _best_of(trials: Iterable[_Trial]) -> _Trial | None:
    return min(trials, key=_by_score, default=None)


def _near(trials: Iterable[_Trial | None]) -> list[_Trial]:
    """Return the best trial, and of the others those that take little longer."""
    first, *others = sorted((trial for trial in trials if trial is not None), key=_by_score)
    *missing, makespan_s = first.score
    within = (*missing, NEAR * makespan_s)
    return [first, *(one for one in others if one is not first and one.score <= within)]


def _by_score(trial: _Trial) -> tuple[Score, int]:
    return trial.score, len(trial.choice.dropped)
